/* From frames of requests 10, 310 and 320 to messages and replies: broker/handlers/usual_sends.py. */
#include "new_messages.h"
#include "send.h"
#include "send_replies.h"
#include "topic_table.h"

#define RESPONSE 1
#define MOST_OF_A_BATCH 4096 /* messages: the reply has an id for each, and its length must fit 24 bits */
#define ENTRY_HEAD 20        /* size, magic, CRC, flag, body length */
#define LONGEST_TOPIC 127
#define LONGEST_PROPERTIES 32767
#define SCRATCH 4096
#define TOGETHER 32

/* The class UsualSends: what all messages are checked against and completed with. */
typedef struct {
    PyObject_HEAD
    TopicTable *topics;
    PyObject *learn, *by_row, *cluster, *store_host; /* owned, as the table */
} UsualSends;

/* One call of `read`. */
typedef struct {
    const UsualSends *usual;
    NewMessages *batch;
    SendReplies *replies;
    int64_t fits, batch_fits;
    /* Where the message before went: mostly the next one goes there, too. Its topic is in the text of the batch. */
    Destination to;
    Py_ssize_t topic_at;
    /* Where the request came from; the host is kept by the batch. */
    PyObject *origin; /* borrowed */
    const byte *born_host;
    Py_ssize_t born_host_size;
    int waits; /* whether the send at hand waits until its messages are safe */
} Reading;

/* A frame whose header could be read. */
typedef struct {
    PyObject *frame; /* owned */
    int64_t kind;
    uint32_t hash; /* of its topic */
    Send send;
} Taken;

static PyObject *n_peer_host;

/* What stands in the properties of a message that is to be looked at. */
typedef struct {
    int is_unusual; /* delayed, timed or transactional, perhaps: the words stand somewhere */
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
        if (starts_with(at, end, "DELAY", 5) || starts_with(at, end, "TRAN_MSG", 8) || starts_with(at, end, "TIMER_D", 7))
            found.is_unusual = 1;
        if (starts_with(at, end, "WAIT\x01", 5) && found.waits++ == 0) found.wait = at;
    }
    return found;
}

/* Ask what is to be known of a topic; 0 when usual messages may not go there. */
static int learn_topic(Reading *reading, const Text *text, uint32_t hash) {
    PyObject *topic = PyUnicode_DecodeUTF8((const char *)text->at, text->size, NULL);
    PyObject *packed = topic != NULL ? PyObject_CallOneArg(reading->usual->learn, topic) : NULL;
    if (topic == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    Py_XDECREF(topic);
    int is_kept = packed != NULL && keep_topic(reading->usual->topics, hash, packed);
    Py_XDECREF(packed);
    return is_kept;
}

/* Find the topic and whether usual messages may go there. */
static int look_up_topic(Reading *reading, const Text *text, uint32_t hash) {
    Destination *to = &reading->to;
    if (text->has_escapes || text->size > LONGEST_TOPIC || text->at[0] == '%') return 0;
    if (to->topic != NULL && to->topic_size == text->size + 1 && !memcmp(to->topic + 1, text->at, (size_t)text->size))
        return 1;
    if (!find_topic(reading->usual->topics, hash, text->at, text->size, to)
        && !(learn_topic(reading, text, hash) && find_topic(reading->usual->topics, hash, text->at, text->size, to))) {
        to->topic = NULL; /* it may have looked at others */
        return 0;
    }
    byte *copy = room_for_text(reading->batch, to->topic_size);
    if (copy == NULL) return 0;
    put_bytes(copy, to->topic, to->topic_size);
    reading->topic_at = copy - reading->batch->text;
    return 1;
}

/* The message whose properties are the last of the text; 0 when those are no UTF-8, or with an exception. */
static int put_message(Reading *reading, int64_t row, const byte *body, Py_ssize_t body_size, Py_ssize_t properties_size,
                       const Send *send, int64_t flag) {
    const NewMessages *batch = reading->batch;
    if (!is_utf8(batch->text + batch->text_size - properties_size, properties_size)) return 0;
    Message *message = add_message(reading->batch, properties_size);
    if (message == NULL) return 0;
    message->topic_at = reading->topic_at, message->topic_size = reading->to.topic_size;
    message->body = body, message->body_size = body_size;
    message->born_host = reading->born_host, message->born_host_size = reading->born_host_size;
    message->store_host = (const byte *)PyBytes_AS_STRING(reading->usual->store_host);
    message->store_host_size = PyBytes_GET_SIZE(reading->usual->store_host);
    message->row = row, message->queue_id = send->queue_id;
    message->flag = flag, message->sys_flag = send->sys_flag;
    message->born_timestamp = send->born_timestamp, message->reconsume_times = send->reconsume_times;
    return 1;
}

/* Where the one pair WAIT=true or WAIT=false ends that was found in the properties; NULL for anything else. */
static const byte *end_of_wait(Reading *reading, const byte *properties, const byte *end, const Found *found) {
    const byte *at = found->wait;
    if (found->waits > 1 || (at > properties && at[-1] != 2)) return NULL;
    reading->waits = starts_with(at, end, "WAIT\x01true", 9);
    if (!reading->waits && !starts_with(at, end, "WAIT\x01" "false", 10)) return NULL;
    at += reading->waits ? 9 : 10;
    return at == end || *at == 2 ? at : NULL;
}

/* WAIT out of a single message's properties, CLUSTER in. Their size; -1 when WAIT is not the usual one. */
static Py_ssize_t put_properties(Reading *reading, const byte *at, Py_ssize_t size, const Found *found) {
    const byte *end = at + size, *before_end = end, *after = end;
    if (found->waits > 0) {
        before_end = found->wait;
        after = end_of_wait(reading, at, end, found);
        if (after == NULL) return -1;
        if (after < end) after++;
    }
    Py_ssize_t before = before_end - at, rest = end - after;
    int is_open = rest > 0 ? end[-1] != 2 : before > 0 && before_end[-1] != 2;
    Py_ssize_t stored = before + rest + is_open + PyBytes_GET_SIZE(reading->usual->cluster);
    byte *to = room_for_text(reading->batch, stored);
    if (to == NULL) return -1;
    to = put_bytes(put_bytes(to, at, before), after, rest);
    if (is_open) *to++ = 2;
    put_object(to, reading->usual->cluster);
    return stored;
}

static int add_single(Reading *reading, int64_t row, PyObject *body, const byte *text, Py_ssize_t size, const Send *send,
                      const Found *found) {
    Py_ssize_t properties = put_properties(reading, text, size, found);
    if (properties < 0 || PyBytes_GET_SIZE(body) + properties > reading->fits) return 0;
    const byte *bytes = (const byte *)PyBytes_AS_STRING(body);
    return put_message(reading, row, bytes, PyBytes_GET_SIZE(body), properties, send, send->message_flag);
}

/* Each message of a batch; how many, or 0 when something about one is not as usual. All have CLUSTER beside their own
   properties, and all that stands in the request. */
static Py_ssize_t add_batch(Reading *reading, int64_t row, PyObject *body, const byte *text, Py_ssize_t text_size,
                            const Send *send, const Found *found) {
    const byte *at = (const byte *)PyBytes_AS_STRING(body), *end = at + PyBytes_GET_SIZE(body);
    if (found->waits > 0 && end_of_wait(reading, text, text + text_size, found) == NULL) return 0;
    Py_ssize_t shared = PyBytes_GET_SIZE(reading->usual->cluster) + (text_size > 0) + text_size, count = 0, total = 0;
    while (at < end) {
        if (end - at < ENTRY_HEAD + 2) return 0;
        uint32_t size = get32(at), body_size = get32(at + 16);
        if (size > (uint64_t)(end - at) || size < ENTRY_HEAD + 2 || body_size > size - ENTRY_HEAD - 2) return 0;
        const byte *own = at + ENTRY_HEAD + body_size + 2;
        Py_ssize_t own_size = own[-2] << 8 | own[-1];
        if (own_size != at + size - own || own_size + 1 + shared > LONGEST_PROPERTIES) return 0;
        if (memmem(own, (size_t)own_size, "TIMER_D", 7) != NULL) return 0;
        int is_open = own_size > 0 && own[own_size - 1] != 2;
        byte *to = room_for_text(reading->batch, own_size + is_open + shared);
        if (to == NULL) return 0;
        to = put_bytes(to, own, own_size);
        if (is_open) *to++ = 2;
        to = put_object(to, reading->usual->cluster);
        if (text_size > 0) *to++ = 2;
        put_bytes(to, text, text_size);
        if (!put_message(reading, row, at + ENTRY_HEAD, body_size, own_size + is_open + shared, send,
                         (int32_t)get32(at + 12)))
            return 0;
        at += size;
        total += record_size(&reading->batch->messages[reading->batch->count - 1]);
        if (++count > MOST_OF_A_BATCH || total > reading->batch_fits) return 0;
    }
    return count;
}

/* Everything but the header: 1 when the messages of this send were added. */
static int add_send(Reading *reading, const Taken *taken, const byte *text, Py_ssize_t size) {
    const Send *send = &taken->send;
    PyObject *body = PyTuple_GET_ITEM(taken->frame, 2);
    NewMessages *batch = reading->batch;
    if (!look_up_topic(reading, &send->topic, taken->hash)) return 0;
    int64_t row = row_of_queue(&reading->to, send->queue_id);
    if (row < 0 || send->sys_flag & TRANSACTION_MASK || send->flag & RESPONSE) return 0;
    Found found = look_through(text, size);
    if (found.is_unusual) return 0;
    Py_ssize_t first = batch->count;
    reading->waits = 1;
    Py_ssize_t count = send->is_batch ? add_batch(reading, row, body, text, size, send, &found)
                                      : add_single(reading, row, body, text, size, send, &found);
    if (count <= 0 || !keep_object(batch, body)) return 0;
    batch->messages[first].begins_group = 1;
    Sent *sent = add_sent(reading->replies);
    if (sent == NULL) return 0;
    sent->kind = taken->kind, sent->code = send->code, sent->opaque = send->opaque, sent->flag = send->flag;
    sent->queue_id = send->queue_id, sent->first = first, sent->count = count, sent->waits = (char)reading->waits;
    return 1;
}

static int add_taken(Reading *reading, const Taken *taken) {
    const Text *properties = &taken->send.properties;
    if (!properties->has_escapes) return add_send(reading, taken, properties->at, properties->size);
    byte on_stack[SCRATCH], *resolved = on_stack;
    if (properties->size > SCRATCH && (resolved = PyMem_Malloc((size_t)properties->size)) == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    Py_ssize_t size = unescape(properties, resolved);
    int is_added = size >= 0 && add_send(reading, taken, resolved, size);
    if (resolved != on_stack) PyMem_Free(resolved);
    return is_added;
}

static int take_frame(const Reading *reading, PyObject *frame, Taken *taken) {
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3) return 0;
    PyObject *header = PyTuple_GET_ITEM(frame, 1), *body = PyTuple_GET_ITEM(frame, 2);
    if (!PyBytes_CheckExact(header) || !PyBytes_CheckExact(body)) return 0;
    if (!as_number(PyTuple_GET_ITEM(frame, 0), 0, 1, &taken->kind)) return 0;
    const byte *bytes = (const byte *)PyBytes_AS_STRING(header);
    if (!parse_send_header(taken->kind, bytes, PyBytes_GET_SIZE(header), &taken->send)) return 0;
    taken->frame = Py_NewRef(frame); /* whatever happens to the list meanwhile */
    taken->hash = hash_topic(reading->usual->topics, taken->send.topic.at, taken->send.topic.size);
    fetch_topic(reading->usual->topics, taken->hash);
    return 1;
}

/* The host that the frames of an origin come from; 0 when it is not known. */
static int take_origin(Reading *reading, PyObject *origin) {
    if (origin == reading->origin) return 1;
    PyObject *host = PyObject_GetAttr(origin, n_peer_host);
    if (host == NULL) return 0;
    int is_host = PyBytes_CheckExact(host) && (PyBytes_GET_SIZE(host) == 8 || PyBytes_GET_SIZE(host) == 20)
        && keep_object(reading->batch, host);
    if (is_host) {
        reading->origin = origin;
        reading->born_host = (const byte *)PyBytes_AS_STRING(host), reading->born_host_size = PyBytes_GET_SIZE(host);
    }
    Py_DECREF(host);
    return is_host;
}

/* Up to `most` frames are looked at together, from `at` on; how many of them were added. */
static Py_ssize_t add_some(Reading *reading, PyObject *frames, PyObject *origins, Py_ssize_t at, Py_ssize_t stop,
                           Py_ssize_t most) {
    Taken taken[TOGETHER];
    Py_ssize_t count = 0, added = 0;
    NewMessages *batch = reading->batch;
    while (count < most && at + count < stop && at + count < PyList_GET_SIZE(frames)
           && take_frame(reading, PyList_GET_ITEM(frames, at + count), &taken[count]))
        count++;
    for (; added < count && at + added < PyList_GET_SIZE(origins); added++) {
        if (!take_origin(reading, PyList_GET_ITEM(origins, at + added))) break;
        Py_ssize_t messages = batch->count, text_size = batch->text_size, kept = batch->kept_count;
        if (add_taken(reading, &taken[added])) continue;
        cut_messages(batch, messages, text_size, kept);
        reading->to.topic = NULL; /* its copy may be gone */
        break;
    }
    for (Py_ssize_t n = 0; n < count; n++) Py_DECREF(taken[n].frame);
    return added;
}

/* frames, origins, at, stop, replies, messages, fits, batch fits -> the first frame that was not read */
static PyObject *usual_read(UsualSends *usual, PyObject *const *args, Py_ssize_t count) {
    int64_t at, stop;
    Reading reading = {.usual = usual};
    if (count != 8 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])
        || !as_number(args[3], 0, PyList_GET_SIZE(args[0]), &stop) || !as_number(args[2], 0, stop, &at)
        || PyList_GET_SIZE(args[1]) < stop || (reading.replies = as_replies(args[4])) == NULL
        || (reading.batch = as_messages(args[5])) == NULL || !as_number(args[6], 0, INT32_MAX, &reading.fits)
        || !as_number(args[7], 0, INT32_MAX, &reading.batch_fits))
        return wrong_arguments("UsualSends.read");
    NewMessages *batch = reading.batch;
    if (batch->by_row == NULL) batch->by_row = Py_NewRef(usual->by_row);
    if (!make_room(batch, (Py_ssize_t)(stop - at)) || !keep_object(batch, usual->store_host)) return NULL;
    /* Looking at many frames together pays when all are usual. Where one is not, the next one may not be, either. */
    Py_ssize_t most = 1, added;
    do {
        at += added = add_some(&reading, args[0], args[1], (Py_ssize_t)at, (Py_ssize_t)stop, most);
        if (added < most) break;
        most = most < TOGETHER / 4 ? 4 * most : TOGETHER;
    } while (at < stop);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(at);
}

/* topic table, a function that knows topics, states by row, cluster property, store host */
static PyObject *new_usual(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *table, *learn, *by_row, *cluster, *host;
    if (!PyArg_ParseTuple(args, "O!OO!SS:UsualSends", &topic_table_type, &table, &learn, &PyList_Type, &by_row, &cluster, &host))
        return NULL;
    if (PyBytes_GET_SIZE(host) != 8 && PyBytes_GET_SIZE(host) != 20) return wrong_arguments("UsualSends");
    UsualSends *usual = (UsualSends *)type->tp_alloc(type, 0);
    if (usual == NULL) return NULL;
    usual->topics = (TopicTable *)Py_NewRef(table), usual->learn = Py_NewRef(learn), usual->by_row = Py_NewRef(by_row);
    usual->cluster = Py_NewRef(cluster), usual->store_host = Py_NewRef(host);
    return (PyObject *)usual;
}

static int traverse_usual(UsualSends *usual, visitproc visit, void *arg) {
    Py_VISIT(usual->learn);
    Py_VISIT(usual->by_row);
    return 0;
}

static int clear_usual(UsualSends *usual) {
    Py_CLEAR(usual->learn);
    Py_CLEAR(usual->by_row);
    return 0;
}

static void free_usual(UsualSends *usual) {
    PyObject_GC_UnTrack(usual);
    clear_usual(usual);
    Py_XDECREF(usual->topics);
    Py_XDECREF(usual->cluster);
    Py_XDECREF(usual->store_host);
    Py_TYPE(usual)->tp_free(usual);
}

static PyMethodDef methods[] = {
    {"read", (PyCFunction)(void (*)(void))usual_read, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject usual_sends_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "downrange._steps.UsualSends",
    .tp_basicsize = sizeof(UsualSends),
    .tp_new = new_usual,
    .tp_dealloc = (destructor)free_usual,
    .tp_traverse = (traverseproc)traverse_usual,
    .tp_clear = (inquiry)clear_usual,
    .tp_methods = methods,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
};

int add_sends(PyObject *module) {
    n_peer_host = PyUnicode_InternFromString("peer_host");
    n_json_pieces = PyUnicode_InternFromString("json_pieces");
    n_binary_pieces = PyUnicode_InternFromString("binary_pieces");
    n_id_size = PyUnicode_InternFromString("id_size");
    return n_peer_host != NULL && n_json_pieces != NULL && n_binary_pieces != NULL && n_id_size != NULL
        && PyModule_AddType(module, &usual_sends_type) == 0
        && PyModule_AddType(module, &send_replies_type) == 0;
}
