/* From the frames of a chunk to the messages of a run: broker/handlers/plain_sends.py, plain_run; and for batches what
   broker/handlers/send.py, send_batch, makes of them. */
#include "run.h"
#include "send.h"
#include "topic_table.h"

#define RESPONSE 1
#define TRANSACTIONAL 12
#define MOST_OF_A_BATCH 4096 /* messages: the reply has an id for each, and its length must fit 24 bits */
#define ENTRY_HEAD 20        /* size, magic, CRC, flag, body length */
#define LONGEST_TOPIC 127
#define LONGEST_PROPERTIES 32767
#define SCRATCH 4096
#define TOGETHER 32

/* What all messages are checked against, and the run that is made of them. */
typedef struct {
    TopicTable *topics;
    PyObject *learn, *cluster; /* borrowed */
    int64_t fits, batch_fits;
    Run *run;
    /* Where the message before went: mostly the next one goes there, too. Its topic is in the run's text. */
    Destination to;
    Py_ssize_t topic_at;
} Making;

/* A frame whose header could be read. */
typedef struct {
    PyObject *frame; /* owned */
    int64_t kind;
    uint32_t hash; /* of its topic */
    Send send;
} Taken;

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

/* Ask what is to be known of a topic; 0 when plain messages may not go there. */
static int learn_topic(Making *making, const Text *text, uint32_t hash) {
    PyObject *topic = PyUnicode_DecodeUTF8((const char *)text->at, text->size, NULL);
    PyObject *packed = topic != NULL ? PyObject_CallOneArg(making->learn, topic) : NULL;
    if (topic == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    Py_XDECREF(topic);
    int is_kept = packed != NULL && keep_topic(making->topics, hash, packed);
    Py_XDECREF(packed);
    return is_kept;
}

/* Find the topic and whether plain messages may go there. */
static int look_up_topic(Making *making, const Text *text, uint32_t hash) {
    Destination *to = &making->to;
    if (text->has_escapes || text->size > LONGEST_TOPIC || text->at[0] == '%') return 0;
    if (to->topic != NULL && to->topic_size == text->size + 1 && !memcmp(to->topic + 1, text->at, (size_t)text->size))
        return 1;
    if (!find_topic(making->topics, hash, text->at, text->size, to)
        && !(learn_topic(making, text, hash) && find_topic(making->topics, hash, text->at, text->size, to))) {
        to->topic = NULL; /* it may have looked at others */
        return 0;
    }
    byte *copy = room_for_text(making->run, to->topic_size);
    if (copy == NULL) return 0;
    put_bytes(copy, to->topic, to->topic_size);
    making->topic_at = copy - making->run->text;
    return 1;
}

/* The message whose properties are the last of the text. */
static int put_message(Making *making, int64_t row, const byte *body, Py_ssize_t body_size, Py_ssize_t properties_size,
                       const Send *send, int64_t flag) {
    Message *message = add_message(making->run, properties_size);
    if (message == NULL) return 0;
    message->topic_at = making->topic_at, message->topic_size = making->to.topic_size;
    message->body = body, message->body_size = body_size;
    message->row = row, message->queue_id = send->queue_id;
    message->flag = flag, message->sys_flag = send->sys_flag;
    message->born_timestamp = send->born_timestamp, message->reconsume_times = send->reconsume_times;
    return 1;
}

/* WAIT=true out of a single message's properties, CLUSTER in. Their size; -1 when WAIT is not the usual one. */
static Py_ssize_t put_properties(Making *making, const byte *at, Py_ssize_t size, const Found *found) {
    const byte *end = at + size, *before_end = end, *after = end;
    if (found->waits > 0) {
        before_end = found->wait;
        after = before_end + 9;
        if (found->waits > 1 || !starts_with(before_end, end, "WAIT\x01true", 9)) return -1;
        if ((before_end > at && before_end[-1] != 2) || (after < end && *after++ != 2)) return -1;
    }
    Py_ssize_t before = before_end - at, rest = end - after;
    int is_open = rest > 0 ? end[-1] != 2 : before > 0 && before_end[-1] != 2;
    Py_ssize_t stored = before + rest + is_open + PyBytes_GET_SIZE(making->cluster);
    byte *to = room_for_text(making->run, stored);
    if (to == NULL) return -1;
    to = put_bytes(put_bytes(to, at, before), after, rest);
    if (is_open) *to++ = 2;
    put_object(to, making->cluster);
    return stored;
}

static int add_single(Making *making, int64_t row, PyObject *body, const byte *text, Py_ssize_t size, const Send *send,
                      const Found *found) {
    Py_ssize_t properties = put_properties(making, text, size, found);
    if (properties < 0 || PyBytes_GET_SIZE(body) + properties > making->fits) return 0;
    const byte *bytes = (const byte *)PyBytes_AS_STRING(body);
    return put_message(making, row, bytes, PyBytes_GET_SIZE(body), properties, send, send->message_flag);
}

/* Each message of a batch; how many, or 0 when something about one is not as usual. All have CLUSTER beside their own
   properties, and all that stands in the request. */
static Py_ssize_t add_batch(Making *making, int64_t row, PyObject *body, const byte *text, Py_ssize_t text_size,
                            const Send *send, const Found *found) {
    const byte *at = (const byte *)PyBytes_AS_STRING(body), *end = at + PyBytes_GET_SIZE(body);
    if (end - at > making->batch_fits) return 0;
    if (found->waits > 1 || (found->waits && !starts_with(found->wait, text + text_size, "WAIT\x01true", 9))) return 0;
    Py_ssize_t shared = PyBytes_GET_SIZE(making->cluster) + (text_size > 0) + text_size, count = 0;
    while (at < end) {
        if (end - at < ENTRY_HEAD + 2) return 0;
        uint32_t size = get32(at), body_size = get32(at + 16);
        if (size > (uint64_t)(end - at) || size < ENTRY_HEAD + 2 || body_size > size - ENTRY_HEAD - 2) return 0;
        const byte *own = at + ENTRY_HEAD + body_size + 2;
        Py_ssize_t own_size = own[-2] << 8 | own[-1];
        if (own_size != at + size - own || own_size + 1 + shared > LONGEST_PROPERTIES) return 0;
        int is_open = own_size > 0 && own[own_size - 1] != 2;
        byte *to = room_for_text(making->run, own_size + is_open + shared);
        if (to == NULL) return 0;
        to = put_bytes(to, own, own_size);
        if (is_open) *to++ = 2;
        to = put_object(to, making->cluster);
        if (text_size > 0) *to++ = 2;
        put_bytes(to, text, text_size);
        if (!put_message(making, row, at + ENTRY_HEAD, body_size, own_size + is_open + shared, send,
                         (int32_t)get32(at + 12)))
            return 0;
        at += size;
        if (++count > MOST_OF_A_BATCH) return 0;
    }
    return count;
}

/* Everything but the header: 1 when the messages of this send were added. */
static int add_send(Making *making, const Taken *taken, const byte *text, Py_ssize_t size) {
    const Send *send = &taken->send;
    PyObject *body = PyTuple_GET_ITEM(taken->frame, 2);
    if (!look_up_topic(making, &send->topic, taken->hash)) return 0;
    int64_t row = row_of_queue(&making->to, send->queue_id);
    if (row < 0 || send->sys_flag & TRANSACTIONAL || send->flag & RESPONSE) return 0;
    Found found = look_through(text, size);
    if (found.is_unusual) return 0;
    Py_ssize_t count = send->is_batch ? add_batch(making, row, body, text, size, send, &found)
                                      : add_single(making, row, body, text, size, send, &found);
    return count > 0 && add_sent(making->run, body, taken->kind, send->opaque, send->flag, send->queue_id, count);
}

static int add_taken(Making *making, const Taken *taken) {
    const Text *properties = &taken->send.properties;
    Run *run = making->run;
    if (run->requests > 0 && run->code != taken->send.code) return 0; /* they are counted by request code */
    run->code = taken->send.code;
    if (!properties->has_escapes) return add_send(making, taken, properties->at, properties->size);
    byte on_stack[SCRATCH], *resolved = on_stack;
    if (properties->size > SCRATCH && (resolved = PyMem_Malloc((size_t)properties->size)) == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    Py_ssize_t size = unescape(properties, resolved);
    int is_added = size >= 0 && add_send(making, taken, resolved, size);
    if (resolved != on_stack) PyMem_Free(resolved);
    return is_added;
}

static int take_frame(Making *making, PyObject *frame, Taken *taken) {
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3) return 0;
    PyObject *header = PyTuple_GET_ITEM(frame, 1), *body = PyTuple_GET_ITEM(frame, 2);
    if (!PyBytes_CheckExact(header) || !PyBytes_CheckExact(body)) return 0;
    if (!as_number(PyTuple_GET_ITEM(frame, 0), 0, 1, &taken->kind)) return 0;
    const byte *bytes = (const byte *)PyBytes_AS_STRING(header);
    if (!parse_send_header(taken->kind, bytes, PyBytes_GET_SIZE(header), &taken->send)) return 0;
    taken->frame = Py_NewRef(frame); /* whatever happens to the list meanwhile */
    taken->hash = hash_topic(making->topics, taken->send.topic.at, taken->send.topic.size);
    fetch_topic(making->topics, taken->hash);
    return 1;
}

/* As many frames as are looked at together, from one on; how many of them were added. */
static Py_ssize_t add_some(Making *making, PyObject *frames, Py_ssize_t at) {
    Taken taken[TOGETHER];
    Py_ssize_t count = 0, added = 0;
    Run *run = making->run;
    while (count < TOGETHER && at + count < PyList_GET_SIZE(frames)
           && take_frame(making, PyList_GET_ITEM(frames, at + count), &taken[count]))
        count++;
    for (; added < count && run->requests < run->requests_room; added++) {
        Py_ssize_t messages = run->count, text_size = run->text_size;
        if (add_taken(making, &taken[added])) continue;
        cut_run(run, messages, text_size);
        making->to.topic = NULL; /* its copy may be gone */
        break;
    }
    for (Py_ssize_t n = 0; n < count; n++) Py_DECREF(taken[n].frame);
    return added;
}

/* frames, at, topic table, who knows topics, states by row, fits, batch fits, cluster -> run */
PyObject *plain_run(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t at;
    Making making = {0};
    if (count != 8 || !PyList_CheckExact(args[0]) || !as_number(args[1], 0, PY_SSIZE_T_MAX, &at)
        || !Py_IS_TYPE(args[2], &topic_table_type) || !PyCallable_Check(args[3]) || !PyList_CheckExact(args[4])
        || !as_number(args[5], 0, INT32_MAX, &making.fits) || !as_number(args[6], 0, INT32_MAX, &making.batch_fits)
        || !PyBytes_CheckExact(args[7]) || at >= PyList_GET_SIZE(args[0]))
        return refuse();
    making.topics = (TopicTable *)args[2], making.learn = args[3], making.cluster = args[7];
    Py_ssize_t frames = PyList_GET_SIZE(args[0]) - at, added;
    Run *run = making.run = new_run(frames, frames);
    if (run == NULL) return NULL;
    run->states = Py_NewRef(args[4]);
    do at += added = add_some(&making, args[0], at);
    while (added == TOGETHER);
    if (run->requests > 0 && !PyErr_Occurred()) return (PyObject *)run;
    Py_DECREF(run);
    return refuse();
}
