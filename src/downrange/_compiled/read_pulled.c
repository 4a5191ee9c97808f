/* Records into messages: client/consumer/messages.py, read_pulled. */
#include "steps.h"

#define FIXED_SIZE 91 /* of a record without body, topic and properties */
#define BODY_AT 88
#define MAGIC_V1 0xDAA320A7u
#define V6_HOSTS (16 | 32)
#define HOST_SIZE 8
#define FIELDS 18


static inline PyObject *number32(const byte *at) { return PyLong_FromLong((int32_t)get32(at)); }

static inline PyObject *number64(const byte *at) { return PyLong_FromLongLong(get64(at)); }

/* A host as bytes; messages that follow each other often have the same. */
static PyObject *host_of(const byte *at, PyObject *last) {
    if (last != NULL && !memcmp(PyBytes_AS_STRING(last), at, HOST_SIZE)) return Py_NewRef(last);
    return PyBytes_FromStringAndSize((const char *)at, HOST_SIZE);
}

/* The size of a record if it is one of the usual kind and its parts add up; 0 else. */
static Py_ssize_t check_record(const byte *at, Py_ssize_t left) {
    if (left < FIXED_SIZE || get32(at + 4) != MAGIC_V1 || get32(at + 36) & V6_HOSTS) return 0;
    int64_t size = (int32_t)get32(at), body_size = (int32_t)get32(at + 84), body_end = BODY_AT + body_size;
    if (body_size < 0 || size > left || body_end + 3 > size) return 0;
    int64_t properties_at = body_end + 3 + at[body_end];
    if (properties_at > size) return 0;
    int16_t properties_size = (int16_t)(at[properties_at - 2] << 8 | at[properties_at - 1]);
    return properties_at + properties_size == size ? (Py_ssize_t)size : 0;
}

static void keep_host(PyObject **host, PyObject *other) {
    if (*host == other) return;
    Py_XDECREF(*host);
    *host = Py_NewRef(other);
}

/* One message; `args` as below. `hosts` are those of the message before, and become those of this one. */
static PyObject *message_of(const byte *at, Py_ssize_t size, PyObject *const *args, PyObject **hosts) {
    Py_ssize_t body_size = (Py_ssize_t)get32(at + 84), properties_at = BODY_AT + body_size + 3 + at[BODY_AT + body_size];
    PyObject *fields[FIELDS] = {
        Py_NewRef(args[2]), Py_NewRef(args[1]), number64(at + 20), number64(at + 28),
        PyBytes_FromStringAndSize((const char *)at + BODY_AT, body_size),
        PyUnicode_DecodeUTF8((const char *)at + properties_at, size - properties_at, NULL),
        number32(at + 36), number32(at + 16), number64(at + 40), host_of(at + 48, hosts[0]), number64(at + 56),
        host_of(at + 64, hosts[1]), number32(at + 72), number64(at + 76), PyLong_FromUnsignedLong(get32(at + 8)),
        PyLong_FromSsize_t(size), Py_NewRef(args[3]), Py_NewRef(args[4]),
    };
    int is_whole = 1;
    for (int n = 0; n < FIELDS; n++) is_whole = is_whole && fields[n] != NULL;
    PyObject *message = is_whole ? PyObject_Vectorcall(args[5], fields, FIELDS, NULL) : NULL;
    if (message != NULL) keep_host(&hosts[0], fields[9]), keep_host(&hosts[1], fields[11]);
    for (int n = 0; n < FIELDS; n++) Py_XDECREF(fields[n]);
    return message;
}

/* records, their queue, their topic as the user knows it, the queue's smallest and largest offset, ReceivedMessage ->
   messages */
PyObject *read_pulled(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyBytes_CheckExact(args[0]) || !PyType_Check(args[5])) return refuse();
    const byte *at = (const byte *)PyBytes_AS_STRING(args[0]), *end = at + PyBytes_GET_SIZE(args[0]);
    PyObject *messages = PyList_New(0), *hosts[2] = {NULL, NULL};
    if (messages == NULL) return NULL;
    while (at < end) {
        Py_ssize_t size = check_record(at, end - at);
        PyObject *message = size > 0 ? message_of(at, size, args, hosts) : NULL;
        int is_added = message != NULL && PyList_Append(messages, message) == 0;
        Py_XDECREF(message);
        if (!is_added) {
            Py_CLEAR(messages);
            if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
            break;
        }
        at += size;
    }
    Py_XDECREF(hosts[0]), Py_XDECREF(hosts[1]);
    return messages != NULL ? messages : refuse();
}
