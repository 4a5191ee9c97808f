/* From the frames of a chunk to the messages of a run: broker/handlers/plain_sends.py, plain_run; and for batches what
   broker/handlers/send.py, send_batch, makes of them. */
#include "send.h"

#define RESPONSE 1
#define TRANSACTIONAL 12
#define MOST_OF_A_BATCH 4096 /* messages: the reply has an id for each, and its length must fit 24 bits */
#define ENTRY_HEAD 20        /* size, magic, CRC, flag, body length */
#define LONGEST_TOPIC 127
#define LONGEST_PROPERTIES 32767
#define SCRATCH 4096

/* What all messages of a run are checked against, and what is made. */
typedef struct {
    PyObject *write_queues_of, *queues_of, *cluster; /* borrowed */
    int64_t fits, batch_fits, code;
    PyObject *messages, *sends; /* owned */
    /* The topic of the message before: mostly that of the next one, too. */
    PyObject *topic; /* owned */
    const char *topic_bytes;
    Py_ssize_t topic_size;
    int64_t write_queues;
    PyObject *queues; /* borrowed */
    int has_one_topic;
} Run;

/* What stands in the properties of a message that is to be looked at. */
typedef struct {
    int is_unusual; /* delayed or transactional, perhaps: the words stand somewhere */
    int waits;      /* how often WAIT stands there, and where it does first */
    const byte *wait;
} Found;

static int starts_with(const byte *at, const byte *end, const char *word, size_t size) {
    return (size_t)(end - at) >= size && !memcmp(at, word, size);
}

static Found look_through(const byte *at, Py_ssize_t size) {
    Found found = {0, 0, NULL};
    for (const byte *end = at + size; at < end; at++) {
        if (*at != 'D' && *at != 'T' && *at != 'W') continue;
        if (starts_with(at, end, "DELAY", 5) || starts_with(at, end, "TRAN_MSG", 8)) found.is_unusual = 1;
        if (starts_with(at, end, "WAIT\x01", 5) && found.waits++ == 0) found.wait = at;
    }
    return found;
}

/* A str; NULL without an exception when it is no UTF-8. */
static PyObject *as_str(const byte *at, Py_ssize_t size) {
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return text;
}

/* Find the topic and whether plain messages may go there. */
static int look_up_topic(Run *run, const Text *text) {
    if (run->topic != NULL && run->topic_size == text->size
        && !memcmp(run->topic_bytes, text->at, (size_t)text->size) && !text->has_escapes)
        return 1;
    if (text->has_escapes || text->size > LONGEST_TOPIC || text->at[0] == '%') return 0;
    PyObject *topic = as_str(text->at, text->size);
    if (topic == NULL) return 0;
    PyObject *write_queues = PyDict_GetItemWithError(run->write_queues_of, topic); /* borrowed */
    run->queues = write_queues != NULL ? PyDict_GetItemWithError(run->queues_of, topic) : NULL;
    if (!as_int32(write_queues, &run->write_queues) || run->queues == NULL || !PyTuple_CheckExact(run->queues)) {
        Py_DECREF(topic);
        return 0;
    }
    if (run->topic != NULL) run->has_one_topic = 0;
    Py_XSETREF(run->topic, topic);
    run->topic_bytes = PyUnicode_AsUTF8AndSize(topic, &run->topic_size);
    if (run->topic_bytes == NULL) Py_CLEAR(run->topic);
    return run->topic != NULL;
}

/* The state of a queue that is there; borrowed. */
static PyObject *look_up_queue(Run *run, int64_t queue_id) {
    if (queue_id < 0 || queue_id >= run->write_queues || queue_id >= PyTuple_GET_SIZE(run->queues)) return NULL;
    PyObject *state = PyTuple_GET_ITEM(run->queues, queue_id);
    return state != Py_None ? state : NULL;
}

/* The message as the store takes it; `properties` is taken over, even on failure. */
static int add_message(Run *run, PyObject *state, const byte *body, Py_ssize_t body_size, PyObject *properties,
                       const Send *send, int64_t flag) {
    PyObject *message = PyTuple_New(MESSAGE_SIZE);
    if (message == NULL) {
        Py_DECREF(properties);
        return 0;
    }
    PyTuple_SET_ITEM(message, 0, Py_NewRef(state));
    PyTuple_SET_ITEM(message, 1, PyBytes_FromStringAndSize((const char *)body, body_size));
    PyTuple_SET_ITEM(message, 2, properties);
    PyTuple_SET_ITEM(message, 3, as_str((const byte *)PyBytes_AS_STRING(properties), PyBytes_GET_SIZE(properties)));
    PyTuple_SET_ITEM(message, 4, PyLong_FromLongLong(send->born_timestamp));
    PyTuple_SET_ITEM(message, 5, PyLong_FromLongLong(flag));
    PyTuple_SET_ITEM(message, 6, PyLong_FromLongLong(send->sys_flag));
    PyTuple_SET_ITEM(message, 7, PyLong_FromLongLong(send->reconsume_times));
    int is_whole = 1;
    for (int n = 0; n < MESSAGE_SIZE; n++) is_whole &= PyTuple_GET_ITEM(message, n) != NULL;
    is_whole = is_whole && PyList_Append(run->messages, message) == 0;
    Py_DECREF(message);
    return is_whole;
}

/* WAIT=true out of a single message's properties, CLUSTER in; NULL when WAIT is not the usual one. */
static PyObject *stored_properties(const byte *at, Py_ssize_t size, const Found *found, PyObject *cluster) {
    const byte *end = at + size, *before_end = end, *after = end;
    if (found->waits > 0) {
        before_end = found->wait;
        after = before_end + 9;
        if (found->waits > 1 || !starts_with(before_end, end, "WAIT\x01true", 9)) return NULL;
        if ((before_end > at && before_end[-1] != 2) || (after < end && *after++ != 2)) return NULL;
    }
    Py_ssize_t before = before_end - at, rest = end - after;
    int is_open = rest > 0 ? end[-1] != 2 : before > 0 && before_end[-1] != 2;
    PyObject *result = PyBytes_FromStringAndSize(NULL, before + rest + is_open + PyBytes_GET_SIZE(cluster));
    if (result == NULL) return NULL;
    byte *to = put_bytes(put_bytes((byte *)PyBytes_AS_STRING(result), at, before), after, rest);
    if (is_open) *to++ = 2;
    put_object(to, cluster);
    return result;
}

static int add_single(Run *run, PyObject *state, PyObject *body, const byte *text, Py_ssize_t size, const Send *send,
                      const Found *found) {
    PyObject *properties = stored_properties(text, size, found, run->cluster);
    if (properties == NULL) return 0;
    if (PyBytes_GET_SIZE(body) + PyBytes_GET_SIZE(properties) > run->fits) {
        Py_DECREF(properties);
        return 0;
    }
    const byte *bytes = (const byte *)PyBytes_AS_STRING(body);
    return add_message(run, state, bytes, PyBytes_GET_SIZE(body), properties, send, send->message_flag);
}

/* What every message of a batch has beside its own properties: CLUSTER, then all that stands in the request. */
static PyObject *shared_properties(const byte *at, Py_ssize_t size, PyObject *cluster) {
    PyObject *shared = PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(cluster) + (size > 0) + size);
    if (shared == NULL) return NULL;
    byte *to = put_object((byte *)PyBytes_AS_STRING(shared), cluster);
    if (size > 0) *to++ = 2;
    put_bytes(to, at, size);
    return shared;
}

/* Each message of a batch; how many, or 0 when something about one is not as usual. */
static Py_ssize_t add_batch(Run *run, PyObject *state, PyObject *body, const byte *text, Py_ssize_t text_size,
                            const Send *send, const Found *found) {
    const byte *at = (const byte *)PyBytes_AS_STRING(body), *end = at + PyBytes_GET_SIZE(body);
    if (end - at > run->batch_fits) return 0;
    if (found->waits > 1 || (found->waits && !starts_with(found->wait, text + text_size, "WAIT\x01true", 9))) return 0;
    PyObject *shared = shared_properties(text, text_size, run->cluster);
    if (shared == NULL) return 0;
    Py_ssize_t count = 0;
    while (at < end) {
        if (end - at < ENTRY_HEAD + 2) break;
        uint32_t size = get32(at), body_size = get32(at + 16);
        if (size > (uint64_t)(end - at) || size < ENTRY_HEAD + 2 || body_size > size - ENTRY_HEAD - 2) break;
        const byte *own = at + ENTRY_HEAD + body_size + 2;
        Py_ssize_t own_size = own[-2] << 8 | own[-1];
        if (own_size != at + size - own || own_size + 1 + PyBytes_GET_SIZE(shared) > LONGEST_PROPERTIES) break;
        int is_open = own_size > 0 && own[own_size - 1] != 2;
        PyObject *properties = PyBytes_FromStringAndSize(NULL, own_size + is_open + PyBytes_GET_SIZE(shared));
        if (properties == NULL) break;
        byte *to = put_bytes((byte *)PyBytes_AS_STRING(properties), own, own_size);
        if (is_open) *to++ = 2;
        put_object(to, shared);
        if (!add_message(run, state, at + ENTRY_HEAD, body_size, properties, send, (int32_t)get32(at + 12))) break;
        at += size;
        if (++count > MOST_OF_A_BATCH) break;
    }
    Py_DECREF(shared);
    return at == end && count <= MOST_OF_A_BATCH ? count : 0;
}

/* Everything but the header: 1 when the messages of this send were added. */
static int add_send(Run *run, int64_t kind, const Send *send, PyObject *body, const byte *text, Py_ssize_t size) {
    if (!look_up_topic(run, &send->topic)) return 0;
    PyObject *state = look_up_queue(run, send->queue_id);
    if (state == NULL || send->sys_flag & TRANSACTIONAL || send->flag & RESPONSE) return 0;
    Found found = look_through(text, size);
    if (found.is_unusual) return 0;
    Py_ssize_t count = send->is_batch ? add_batch(run, state, body, text, size, send, &found)
                                      : add_single(run, state, body, text, size, send, &found);
    if (count == 0) return 0;
    const int64_t numbers[] = {kind, send->opaque, send->flag, send->queue_id, count};
    PyObject *sent = PyTuple_New(5);
    int is_added = sent != NULL;
    for (int n = 0; sent != NULL && n < 5; n++) {
        PyTuple_SET_ITEM(sent, n, PyLong_FromLongLong(numbers[n]));
        is_added = is_added && PyTuple_GET_ITEM(sent, n) != NULL;
    }
    is_added = is_added && PyList_Append(run->sends, sent) == 0;
    Py_XDECREF(sent);
    return is_added;
}

static int take_frame(Run *run, PyObject *frame) {
    int64_t kind;
    Send send;
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3) return 0;
    PyObject *header = PyTuple_GET_ITEM(frame, 1), *body = PyTuple_GET_ITEM(frame, 2);
    if (!PyBytes_CheckExact(header) || !PyBytes_CheckExact(body)) return 0;
    if (!as_number(PyTuple_GET_ITEM(frame, 0), 0, 1, &kind)) return 0;
    if (!parse_send_header(kind, (const byte *)PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header), &send)) return 0;
    if (run->code != 0 && run->code != send.code) return 0; /* they are counted by request code */
    run->code = send.code;
    if (!send.properties.has_escapes)
        return add_send(run, kind, &send, body, send.properties.at, send.properties.size);
    byte on_stack[SCRATCH], *resolved = on_stack;
    if (send.properties.size > SCRATCH && (resolved = PyMem_Malloc((size_t)send.properties.size)) == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    Py_ssize_t size = unescape(&send.properties, resolved);
    int is_added = size >= 0 && add_send(run, kind, &send, body, resolved, size);
    if (resolved != on_stack) PyMem_Free(resolved);
    return is_added;
}

/* frames, at, write queues by topic, queues by topic, fits, batch fits, cluster -> request code, topic or None, messages, sends */
PyObject *plain_run(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t at;
    Run run = {.has_one_topic = 1};
    if (count != 7 || !PyList_CheckExact(args[0]) || !as_number(args[1], 0, PY_SSIZE_T_MAX, &at)
        || !PyDict_CheckExact(args[2]) || !PyDict_CheckExact(args[3]) || !as_number(args[4], 0, INT32_MAX, &run.fits)
        || !as_number(args[5], 0, INT32_MAX, &run.batch_fits) || !PyBytes_CheckExact(args[6]))
        return refuse();
    run.write_queues_of = args[2], run.queues_of = args[3], run.cluster = args[6];
    run.messages = PyList_New(0);
    run.sends = PyList_New(0);
    PyObject *result = NULL;
    if (run.messages == NULL || run.sends == NULL) goto end;
    for (; at < PyList_GET_SIZE(args[0]); at++) {
        Py_ssize_t before = PyList_GET_SIZE(run.messages);
        PyObject *frame = Py_NewRef(PyList_GET_ITEM(args[0], at)); /* whatever happens to the list meanwhile */
        int is_taken = take_frame(&run, frame);
        Py_DECREF(frame);
        if (is_taken) continue;
        if (PyErr_Occurred() || PyList_SetSlice(run.messages, before, PyList_GET_SIZE(run.messages), NULL) < 0) goto end;
        break;
    }
    if (PyList_GET_SIZE(run.sends) > 0)
        result = Py_BuildValue("(LOOO)", (long long)run.code, run.has_one_topic ? run.topic : Py_None, run.messages,
                               run.sends);
end:
    Py_XDECREF(run.messages);
    Py_XDECREF(run.sends);
    Py_XDECREF(run.topic);
    return result != NULL ? result : refuse();
}
