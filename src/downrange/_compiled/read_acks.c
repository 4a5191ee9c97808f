/* Acknowledgements of popped messages: read_acks of protocol/bodies/pop_frames.py. */
#include "request_header.h"

#define ACK_MESSAGE 200051
#define MOST_BITS 63
#define MOST_GROUPS 64 /* leases that an acknowledgement is looked for in; more than a run usually has */
#define ALL_SEEN 31

typedef struct {
    Text topic, group, handle;
    int64_t queue_id, offset, start, pop_time, invisible_time, revive_queue;
    uint32_t seen;
} Ack;

static int take_code(void *Py_UNUSED(to), int64_t code) { return code == ACK_MESSAGE; }

static int see(Ack *ack, uint32_t bit) {
    int is_first = !(ack->seen & bit);
    ack->seen |= bit;
    return is_first;
}

static int take_field(void *to, const Text *name, const Text *value) {
    Ack *ack = to;
    if (name->has_escapes || !name->is_ascii || value->has_escapes || !value->is_ascii) return 0;
    if (is_text(name, "topic")) {
        ack->topic = *value;
        return see(ack, 1);
    }
    if (is_text(name, "consumerGroup")) {
        ack->group = *value;
        return see(ack, 2);
    }
    if (is_text(name, "extraInfo")) {
        ack->handle = *value;
        return see(ack, 4);
    }
    if (is_text(name, "queueId"))
        return see(ack, 8) && parse_number(value->at, value->size, INT32_MIN, INT32_MAX, &ack->queue_id);
    if (is_text(name, "offset"))
        return see(ack, 16) && parse_number(value->at, value->size, INT64_MIN, INT64_MAX, &ack->offset);
    return 1;
}

/* The text up to the next blank; `*at` moves behind the blank. */
static Text next_item(const byte **at, const byte *end) {
    const byte *from = *at;
    while (*at < end && **at != ' ') ++*at;
    Text item = {from, *at - from, 0, 1};
    if (*at < end) ++*at;
    return item;
}

/* Eight items, all but the sixth are numbers; further ones are ignored. */
static int parse_handle(Ack *ack) {
    const byte *at = ack->handle.at, *end = at + ack->handle.size;
    int64_t flag, ignored, *const numbers[] = {&ack->start, &ack->pop_time, &ack->invisible_time, &ack->revive_queue,
                                               &flag,       NULL,           &ignored,            &ignored};
    for (int n = 0; n < 8; n++) {
        if (at >= end) return 0;
        Text item = next_item(&at, end);
        if (numbers[n] != NULL && !parse_number(item.at, item.size, INT64_MIN, INT64_MAX, numbers[n])) return 0;
    }
    return flag >= 0 && flag <= 2;
}

static int parse_ack(PyObject *frame, Ack *ack, int64_t *opaque) {
    int64_t kind;
    RequestHeader header = {0, 0};
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3
        || !as_number(PyTuple_GET_ITEM(frame, 0), 0, 0, &kind) || !PyBytes_CheckExact(PyTuple_GET_ITEM(frame, 1)))
        return 0;
    PyObject *bytes = PyTuple_GET_ITEM(frame, 1);
    memset(ack, 0, sizeof *ack);
    if (!walk_json((const byte *)PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes), &header, take_code, take_field, ack)
        || ack->seen != ALL_SEEN || header.flag != 0 || !parse_handle(ack))
        return 0;
    *opaque = header.opaque;
    return ack->offset >= ack->start && ack->offset - ack->start < MOST_BITS;
}

static int is_same(const Text *one, const Text *other) {
    return one->size == other->size && !memcmp(one->at, other->at, (size_t)one->size);
}

static int is_same_lease(const Ack *one, const Ack *other) {
    return one->start == other->start && one->pop_time == other->pop_time && one->queue_id == other->queue_id
           && one->invisible_time == other->invisible_time && one->revive_queue == other->revive_queue
           && is_same(&one->topic, &other->topic) && is_same(&one->group, &other->group);
}

/* Acknowledged messages of one lease; the texts are those of a frame that is kept by its list. */
typedef struct {
    Ack first;
    uint64_t bits;
} Group;

static PyObject *tuple_of(const Group *group) {
    const Ack *ack = &group->first;
    return Py_BuildValue("(s#s#LLLLLK)", (const char *)ack->topic.at, ack->topic.size, (const char *)ack->group.at,
                         ack->group.size, (long long)ack->queue_id, (long long)ack->start, (long long)ack->pop_time,
                         (long long)ack->invisible_time, (long long)ack->revive_queue, (unsigned long long)group->bits);
}

/* The group that an acknowledgement belongs to; it is added if it is new. NULL when there is no room for it. */
static Group *group_of(Group *groups, Py_ssize_t *count, const Ack *ack) {
    for (Py_ssize_t n = *count - 1; n >= 0; n--)
        if (is_same_lease(&groups[n].first, ack)) return &groups[n];
    if (*count == MOST_GROUPS) return NULL;
    groups[*count] = (Group){*ack, 0};
    return &groups[(*count)++];
}

static byte *put_reply(byte *frame, PyObject *pieces, int64_t opaque) {
    byte *header = frame + 8;
    byte *at = put_object(put_decimal(put_object(header, PyTuple_GET_ITEM(pieces, 0)), opaque), PyTuple_GET_ITEM(pieces, 1));
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size), size);
    return at;
}

/* frames, at, stop, pieces of a reply -> position of the first frame that was not read, groups, replies */
PyObject *read_acks(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, stop;
    Py_ssize_t around = count == 4 ? measure(args[3], 2) : -1;
    if (around < 0 || !PyList_CheckExact(args[0]) || !as_number(args[2], 0, PyList_GET_SIZE(args[0]), &stop)
        || !as_number(args[1], 0, stop, &at))
        return wrong_arguments("read_acks");
    Group groups[MOST_GROUPS];
    Py_ssize_t group_count = 0;
    PyObject *replies = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(stop - at) * (around + 32));
    if (replies == NULL) return NULL;
    byte *start = (byte *)PyBytes_AS_STRING(replies), *end = start;
    for (; at < stop; at++) {
        Ack ack;
        int64_t opaque;
        if (!parse_ack(PyList_GET_ITEM(args[0], at), &ack, &opaque)) break;
        Group *group = group_of(groups, &group_count, &ack);
        if (group == NULL) break;
        group->bits |= 1ull << (ack.offset - ack.start);
        end = put_reply(end, args[3], opaque);
    }
    PyObject *list = _PyBytes_Resize(&replies, end - start) < 0 ? NULL : PyList_New(group_count);
    for (Py_ssize_t n = 0; list != NULL && n < group_count; n++) {
        PyObject *group = tuple_of(&groups[n]);
        if (group == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, n, group);
    }
    if (list != NULL) return Py_BuildValue("(LNN)", (long long)at, list, replies);
    Py_XDECREF(replies);
    return NULL;
}
