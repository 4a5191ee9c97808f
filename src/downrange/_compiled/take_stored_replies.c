/* Replies to sends that were stored: take_stored_replies of client/producer/stored_reply.py. */
#include "json_text.h"

#define RESPONSE_FLAG 1

enum {
    CODE_SEEN = 1, OPAQUE_SEEN = 2, FLAG_SEEN = 4, EXT_SEEN = 8,
    ID_SEEN = 16, QUEUE_SEEN = 32, OFFSET_SEEN = 64, REGION_SEEN = 128, TRACE_SEEN = 256,
};
#define NEEDED (CODE_SEEN | EXT_SEEN | ID_SEEN | QUEUE_SEEN | OFFSET_SEEN)

typedef struct {
    uint32_t seen;
    int trace_on;
    Text id, region;
    int64_t code, opaque, flag, queue_id, queue_offset;
} Stored;

static PyObject *s_done, *s_set_result;

int make_reply_names(void) {
    s_done = PyUnicode_InternFromString("done");
    s_set_result = PyUnicode_InternFromString("set_result");
    return s_done != NULL && s_set_result != NULL;
}

/* Marks a field as seen; 0 when it was seen before. */
static int see(Stored *stored, uint32_t bit) {
    uint32_t before = stored->seen & bit;
    stored->seen |= bit;
    return !before;
}

static int is_simple(const Text *text) { return text->is_ascii && !text->has_escapes; }

static int take_field(Stored *stored, const Text *name, const Text *value) {
    if (!is_simple(name) || !is_simple(value)) return 0;
    if (is_text(name, "msgId")) {
        stored->id = *value;
        return see(stored, ID_SEEN);
    }
    if (is_text(name, "queueId"))
        return see(stored, QUEUE_SEEN) && parse_number(value->at, value->size, INT32_MIN, INT32_MAX, &stored->queue_id);
    if (is_text(name, "queueOffset"))
        return see(stored, OFFSET_SEEN) && parse_number(value->at, value->size, INT64_MIN, INT64_MAX, &stored->queue_offset);
    if (is_text(name, "MSG_REGION")) {
        stored->region = *value;
        return see(stored, REGION_SEEN);
    }
    if (is_text(name, "TRACE_ON")) {
        stored->trace_on = is_text(value, "true");
        return see(stored, TRACE_SEEN) && (stored->trace_on || is_text(value, "false"));
    }
    return is_text(name, "transactionId");
}

static int parse_fields(const byte **at, const byte *end, Stored *stored) {
    Text name, value;
    if (*at >= end || *(*at)++ != '{') return 0;
    for (;;) {
        if (!parse_text(at, end, &name) || *at >= end || *(*at)++ != ':') return 0;
        if (!parse_text(at, end, &value) || !take_field(stored, &name, &value) || *at >= end) return 0;
        byte after = *(*at)++;
        if (after == '}') return 1;
        if (after != ',') return 0;
    }
}

/* Reads a reply as brokers usually write it; 0 for any other. */
static int parse_stored(const byte *at, Py_ssize_t size, Stored *stored) {
    const byte *end = at + size;
    memset(stored, 0, sizeof *stored);
    stored->trace_on = 1;
    if (at >= end || *at++ != '{') return 0;
    for (;;) {
        Text name, text;
        int64_t ignored;
        int is_read;
        if (!parse_text(&at, end, &name) || at >= end || *at++ != ':' || at >= end) return 0;
        if (is_text(&name, "extFields")) is_read = see(stored, EXT_SEEN) && parse_fields(&at, end, stored);
        else if (is_text(&name, "code")) is_read = see(stored, CODE_SEEN) && parse_json_number(&at, end, &stored->code);
        else if (is_text(&name, "opaque")) is_read = see(stored, OPAQUE_SEEN) && parse_json_number(&at, end, &stored->opaque);
        else if (is_text(&name, "flag")) is_read = see(stored, FLAG_SEEN) && parse_json_number(&at, end, &stored->flag);
        else if (is_text(&name, "language") || is_text(&name, "serializeTypeCurrentRPC"))
            is_read = parse_text(&at, end, &text) && is_simple(&text);
        else is_read = is_text(&name, "version") && parse_json_number(&at, end, &ignored);
        if (!is_read || at >= end) return 0;
        if (*at == '}') break;
        if (*at++ != ',') return 0;
    }
    return at + 1 == end && (stored->seen & NEEDED) == NEEDED && stored->code == 0 && stored->flag & RESPONSE_FLAG;
}

static PyObject *text_of(const Text *text) {
    PyObject *object = PyUnicode_New(text->size, 127);
    if (object != NULL) memcpy(PyUnicode_1BYTE_DATA(object), text->at, (size_t)text->size);
    return object;
}

/* The queue the message was stored in: with the sender's name of the topic, and the queue id of the reply. */
static PyObject *queue_of(const Stored *stored, PyObject *topic, PyObject *queue) {
    int64_t asked_for;
    if (is_same_text(PyTuple_GET_ITEM(queue, 0), topic) && as_int32(PyTuple_GET_ITEM(queue, 2), &asked_for)
        && asked_for == stored->queue_id)
        return Py_NewRef(queue);
    return PyObject_CallFunction((PyObject *)Py_TYPE(queue), "OOL", topic, PyTuple_GET_ITEM(queue, 1),
                                 (long long)stored->queue_id);
}

static PyObject *result_of(const Stored *stored, PyObject *expected, PyObject *type, PyObject *status) {
    PyObject *queue = queue_of(stored, PyTuple_GET_ITEM(expected, 1), PyTuple_GET_ITEM(expected, 2));
    PyObject *id = text_of(&stored->id), *offset = PyLong_FromLongLong(stored->queue_offset), *result = NULL;
    PyObject *region = stored->seen & REGION_SEEN ? text_of(&stored->region) : Py_NewRef(Py_None);
    if (queue != NULL && id != NULL && offset != NULL && region != NULL) {
        PyObject *fields[] = {
            status, PyTuple_GET_ITEM(expected, 0), id, queue, offset, region, stored->trace_on ? Py_True : Py_False,
        };
        result = PyObject_Vectorcall(type, fields, 7, NULL);
    }
    Py_XDECREF(queue), Py_XDECREF(id), Py_XDECREF(offset), Py_XDECREF(region);
    return result;
}

/* Is it the request of a send, an Asked whose last item is an Expected: id, topic, queue? */
static int is_send(PyObject *asked, PyTypeObject *queue_type) {
    if (!PyTuple_Check(asked) || PyTuple_GET_SIZE(asked) != 5) return 0;
    PyObject *expected = PyTuple_GET_ITEM(asked, 4);
    return PyTuple_CheckExact(expected) && PyTuple_GET_SIZE(expected) == 3
        && Py_IS_TYPE(PyTuple_GET_ITEM(expected, 2), queue_type) && PyTuple_Check(PyTuple_GET_ITEM(expected, 2))
        && PyTuple_GET_SIZE(PyTuple_GET_ITEM(expected, 2)) == 3;
}

/* Gives the waiter its SendResult. 1 when done, 0 when no send waits for this reply, -1 with an exception. */
static int tell(const Stored *stored, PyObject *requests, PyObject *const *kinds) {
    PyObject *opaque = PyLong_FromLongLong(stored->opaque), *result = NULL;
    if (opaque == NULL) return -1;
    PyObject *asked = PyDict_GetItemWithError(requests, opaque);
    int told = asked == NULL ? (PyErr_Occurred() ? -1 : 0) : is_send(asked, (PyTypeObject *)kinds[2]);
    if (told == 1) {
        Py_INCREF(asked);
        PyObject *waiter = PyTuple_GET_ITEM(asked, 0), *done = NULL, *nothing = NULL;
        told = -1;
        if ((result = result_of(stored, PyTuple_GET_ITEM(asked, 4), kinds[0], kinds[1])) != NULL
            && PyDict_DelItem(requests, opaque) == 0 && (done = PyObject_CallMethodNoArgs(waiter, s_done)) != NULL) {
            told = PyObject_IsTrue(done);
            if (told == 0) told = (nothing = PyObject_CallMethodOneArg(waiter, s_set_result, result)) != NULL ? 1 : -1;
        }
        Py_XDECREF(done), Py_XDECREF(nothing), Py_XDECREF(result);
        Py_DECREF(asked);
    }
    Py_DECREF(opaque);
    return told;
}

/* take_stored_replies(frames, at, requests, (SendResult, SEND_OK, MessageQueue)) -> position of the first frame left */
PyObject *take_stored_replies(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at;
    if (count != 4 || !PyList_CheckExact(args[0]) || !as_number(args[1], 0, INT32_MAX, &at) || !PyDict_CheckExact(args[2])
        || !PyTuple_CheckExact(args[3]) || PyTuple_GET_SIZE(args[3]) != 3 || !PyType_Check(PyTuple_GET_ITEM(args[3], 2)))
        return PyErr_Format(PyExc_TypeError, "take_stored_replies: wrong arguments");
    for (; at < PyList_GET_SIZE(args[0]); at++) {
        Stored stored;
        int64_t kind;
        PyObject *frame = PyList_GET_ITEM(args[0], at);
        if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3 || !PyBytes_CheckExact(PyTuple_GET_ITEM(frame, 1))
            || !as_number(PyTuple_GET_ITEM(frame, 0), 0, 255, &kind) || kind != 0)
            break;
        PyObject *header = Py_NewRef(PyTuple_GET_ITEM(frame, 1)); /* a waiter may do anything, even change `frames` */
        int told = 0;
        if (parse_stored((const byte *)PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header), &stored))
            told = tell(&stored, args[2], &PyTuple_GET_ITEM(args[3], 0));
        Py_DECREF(header);
        if (told < 0) return NULL;
        if (told == 0) break;
    }
    return PyLong_FromLongLong(at);
}
