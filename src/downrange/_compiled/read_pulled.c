/* Records into messages: client/consumer/messages.py, read_usual. */
#include "records.h"

#define HOST_SIZE 8
#define FIELDS 18

static inline PyObject *number32(const byte *at) { return PyLong_FromLong((int32_t)get32(at)); }

static inline PyObject *number64(const byte *at) { return PyLong_FromLongLong(get64(at)); }

/* A host as bytes: `last`, the host of the message before, when it is equal, as it mostly is. */
static PyObject *host_of(const byte *at, Py_ssize_t size, PyObject *last) {
    if (last != NULL && PyBytes_GET_SIZE(last) == size && !memcmp(PyBytes_AS_STRING(last), at, (size_t)size))
        return Py_NewRef(last);
    return PyBytes_FromStringAndSize((const char *)at, size);
}

static void keep_host(PyObject **host, PyObject *other) {
    if (*host == other) return;
    Py_XDECREF(*host);
    *host = Py_NewRef(other);
}

/* One message; `args` as below. `hosts` are the hosts of the message before, and become the hosts of this one. */
static PyObject *message_of(const Record *record, PyObject *const *args, PyObject **hosts) {
    const byte *at = record->start, *late = at + record->born_extra, *last = late + record->store_extra;
    PyObject *fields[FIELDS] = {
        Py_NewRef(args[2]), Py_NewRef(args[1]), number64(at + QUEUE_OFFSET_AT), number64(at + PHYSICAL_OFFSET_AT),
        PyBytes_FromStringAndSize((const char *)record->body, record->body_size),
        PyUnicode_DecodeUTF8((const char *)record->properties, record->properties_size, NULL),
        number32(at + SYS_FLAG_AT), number32(at + FLAG_AT), number64(at + BORN_TIMESTAMP_AT),
        host_of(at + BORN_HOST_AT, HOST_SIZE + record->born_extra, hosts[0]), number64(late + STORE_TIMESTAMP_AT),
        host_of(late + STORE_HOST_AT, HOST_SIZE + record->store_extra, hosts[1]), number32(last + RECONSUME_TIMES_AT),
        number64(last + PREPARED_OFFSET_AT), PyLong_FromUnsignedLong(get32(at + BODY_CRC_AT)),
        PyLong_FromLongLong(record->size), Py_NewRef(args[3]), Py_NewRef(args[4]),
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
PyObject *read_usual(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyBytes_CheckExact(args[0]) || !PyType_Check(args[5])) return refuse();
    const byte *at = (const byte *)PyBytes_AS_STRING(args[0]), *end = at + PyBytes_GET_SIZE(args[0]);
    PyObject *messages = PyList_New(0), *hosts[2] = {NULL, NULL};
    if (messages == NULL) return NULL;
    while (at < end) {
        Record record;
        PyObject *message = read_record(at, end - at, &record) ? message_of(&record, args, hosts) : NULL;
        int is_added = message != NULL && PyList_Append(messages, message) == 0;
        Py_XDECREF(message);
        if (!is_added) {
            Py_CLEAR(messages);
            if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
            break;
        }
        at += record.size;
    }
    Py_XDECREF(hosts[0]), Py_XDECREF(hosts[1]);
    return messages != NULL ? messages : refuse();
}
