/* Acknowledgements of popped messages: read_acks of protocol/bodies/pop_frames.py. */
#include "request_header.h"

#define ACK_MESSAGE 200051
#define BATCH_ACK_MESSAGE 200151
#define MOST_BITS 63
#define MOST_GROUPS 64 /* leases that an acknowledgement is looked for in; more than a run usually has */
#define MOST_ENTRIES 32 /* of one batch */
#define ALL_SEEN 31
#define ENTRY_SEEN 127

/* Acknowledged messages of one lease; the texts are those of a frame that is kept by its list. */
typedef struct {
    Text topic, group;
    int64_t queue_id, start, pop_time, invisible_time, revive_queue;
    uint64_t bits;
} Group;

/* What one request says. */
typedef struct {
    Group groups[MOST_ENTRIES];
    Text handle;
    int64_t code, offset;
    int count;
    uint32_t seen;
} Ack;

static int take_code(void *to, int64_t code) {
    ((Ack *)to)->code = code;
    return code == ACK_MESSAGE || code == BATCH_ACK_MESSAGE;
}

static int see(uint32_t *seen, uint32_t bit) {
    int is_first = !(*seen & bit);
    *seen |= bit;
    return is_first;
}

/* --- one message --- */

static int take_field(void *to, const Text *name, const Text *value) {
    Ack *ack = to;
    Group *group = ack->groups;
    if (name->has_escapes || !name->is_ascii || value->has_escapes || !value->is_ascii) return 0;
    if (is_text(name, "topic")) {
        group->topic = *value;
        return see(&ack->seen, 1);
    }
    if (is_text(name, "consumerGroup")) {
        group->group = *value;
        return see(&ack->seen, 2);
    }
    if (is_text(name, "extraInfo")) {
        ack->handle = *value;
        return see(&ack->seen, 4);
    }
    if (is_text(name, "queueId"))
        return see(&ack->seen, 8) && parse_number(value->at, value->size, INT32_MIN, INT32_MAX, &group->queue_id);
    if (is_text(name, "offset"))
        return see(&ack->seen, 16) && parse_number(value->at, value->size, INT64_MIN, INT64_MAX, &ack->offset);
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
static int parse_handle(const Text *handle, Group *group) {
    const byte *at = handle->at, *end = at + handle->size;
    int64_t flag, ignored;
    int64_t *const numbers[] = {&group->start, &group->pop_time, &group->invisible_time, &group->revive_queue,
                                &flag,         NULL,             &ignored,               &ignored};
    for (int n = 0; n < 8; n++) {
        if (at >= end) return 0;
        Text item = next_item(&at, end);
        if (numbers[n] != NULL && !parse_number(item.at, item.size, INT64_MIN, INT64_MAX, numbers[n])) return 0;
    }
    return flag >= 0 && flag <= 2;
}

static int parse_single(Ack *ack) {
    Group *group = ack->groups;
    if (ack->seen != ALL_SEEN || !parse_handle(&ack->handle, group)) return 0;
    if (ack->offset < group->start || ack->offset - group->start >= MOST_BITS) return 0;
    group->bits = 1ull << (ack->offset - group->start);
    ack->count = 1;
    return 1;
}

/* --- a batch --- */

static int base64_digit(byte c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* The bit set of a batch, in little-endian bytes; 0 unless it is a usual one: not empty, not too long, bits behind its end
   are zero. */
static int parse_bits(const Text *text, uint64_t *bits) {
    Py_ssize_t size = text->size, count = 0;
    if (size == 0 || size % 4 || size > 12) return 0;
    while (size > 0 && text->at[size - 1] == '=') size--;
    if (text->size - size > 2) return 0;
    uint32_t held = 0;
    *bits = 0;
    for (Py_ssize_t n = 0; n < size; n++) {
        int six_bits = base64_digit(text->at[n]);
        if (six_bits < 0) return 0;
        held = held << 6 | (uint32_t)six_bits;
        if (n % 4 == 0) continue;
        int left = 6 - 2 * (int)(n % 4); /* bits that belong to the next byte */
        uint64_t value = held >> left & 0xFF;
        if (count < 8) *bits |= value << (8 * count);
        else if (value) return 0;
        count++;
        held &= (1u << left) - 1;
    }
    return held == 0 && *bits != 0 && *bits < 1ull << MOST_BITS;
}

static int parse_json_long(const byte **at, const byte *end, int64_t least, int64_t most, int64_t *number) {
    const byte *from = *at;
    while (*at < end && **at != ',' && **at != '}') ++*at;
    return parse_number(from, *at - from, least, most, number);
}

static int parse_member(const byte **at, const byte *end, const Text *name, Group *group, uint32_t *seen) {
    static const char *const names[] = {"c", "t", "so", "q", "rq", "pt", "it"};
    int64_t *const numbers[] = {&group->start, &group->queue_id, &group->revive_queue, &group->pop_time,
                                &group->invisible_time};
    Text text;
    for (int n = 0; n < 7; n++) {
        if (!is_text(name, names[n])) continue;
        if (!see(seen, 1u << n)) return 0;
        if (n > 1) {
            int is_short = n == 3 || n == 4;
            return parse_json_long(at, end, is_short ? INT32_MIN : INT64_MIN, is_short ? INT32_MAX : INT64_MAX, numbers[n - 2]);
        }
        if (!parse_text(at, end, &text) || text.has_escapes || !text.is_ascii) return 0;
        *(n ? &group->topic : &group->group) = text;
        return 1;
    }
    if (!parse_text(at, end, &text)) return 0;
    if (is_text(name, "r")) return is_text(&text, "0"); /* others name a retry topic, which Python knows */
    return is_text(name, "b") && see(seen, 128) && parse_bits(&text, &group->bits);
}

static int parse_entry(const byte **at, const byte *end, Group *group) {
    uint32_t seen = 0;
    Text name;
    if (*at >= end || *(*at)++ != '{') return 0;
    for (;;) {
        if (!parse_text(at, end, &name) || *at >= end || *(*at)++ != ':') return 0;
        if (!parse_member(at, end, &name, group, &seen) || *at >= end) return 0;
        byte after = *(*at)++;
        if (after == '}') return seen == (ENTRY_SEEN | 128);
        if (after != ',') return 0;
    }
}

/* {"acks":[...],"brokerName":"..."} as Java writes it */
static int parse_batch(PyObject *body, Ack *ack) {
    static const char start[] = "{\"acks\":[", behind[] = "],\"brokerName\":";
    Text name;
    if (!PyBytes_CheckExact(body)) return 0;
    const byte *at = (const byte *)PyBytes_AS_STRING(body), *end = at + PyBytes_GET_SIZE(body);
    if (end - at < (Py_ssize_t)strlen(start) || memcmp(at, start, strlen(start))) return 0;
    at += strlen(start);
    do {
        if (ack->count == MOST_ENTRIES || !parse_entry(&at, end, &ack->groups[ack->count++])) return 0;
    } while (at < end && *at == ',' && at++);
    if (end - at < (Py_ssize_t)strlen(behind) || memcmp(at, behind, strlen(behind))) return 0;
    at += strlen(behind);
    return parse_text(&at, end, &name) && !name.has_escapes && name.is_ascii && end - at == 1 && *at == '}';
}

/* --- a run --- */

static int parse_ack(PyObject *frame, Ack *ack, int64_t *opaque) {
    int64_t kind;
    RequestHeader header = {0, 0};
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3
        || !as_number(PyTuple_GET_ITEM(frame, 0), 0, 0, &kind) || !PyBytes_CheckExact(PyTuple_GET_ITEM(frame, 1)))
        return 0;
    PyObject *bytes = PyTuple_GET_ITEM(frame, 1);
    ack->seen = 0, ack->count = 0;
    if (!walk_json((const byte *)PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes), &header, take_code, take_field, ack)
        || header.flag != 0)
        return 0;
    *opaque = header.opaque;
    return ack->code == ACK_MESSAGE ? parse_single(ack) : parse_batch(PyTuple_GET_ITEM(frame, 2), ack);
}

static int is_same(const Text *one, const Text *other) {
    return one->size == other->size && !memcmp(one->at, other->at, (size_t)one->size);
}

static int is_same_lease(const Group *one, const Group *other) {
    return one->start == other->start && one->pop_time == other->pop_time && one->queue_id == other->queue_id
           && one->invisible_time == other->invisible_time && one->revive_queue == other->revive_queue
           && is_same(&one->topic, &other->topic) && is_same(&one->group, &other->group);
}

static PyObject *tuple_of(const Group *group) {
    return Py_BuildValue("(s#s#LLLLLK)", (const char *)group->topic.at, group->topic.size,
                         (const char *)group->group.at, group->group.size, (long long)group->queue_id,
                         (long long)group->start, (long long)group->pop_time, (long long)group->invisible_time,
                         (long long)group->revive_queue, (unsigned long long)group->bits);
}

/* Add what a request says to the groups of a run. */
static void add_groups(Group *groups, Py_ssize_t *count, const Ack *ack) {
    for (const Group *one = ack->groups; one < ack->groups + ack->count; one++) {
        Py_ssize_t n = *count - 1;
        while (n >= 0 && !is_same_lease(&groups[n], one)) n--;
        if (n >= 0) groups[n].bits |= one->bits;
        else groups[(*count)++] = *one;
    }
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
    int64_t at, stop, opaque, code = 0;
    Py_ssize_t around = count == 4 ? measure(args[3], 2) : -1;
    if (around < 0 || !PyList_CheckExact(args[0]) || !as_number(args[2], 0, PyList_GET_SIZE(args[0]), &stop)
        || !as_number(args[1], 0, stop, &at))
        return wrong_arguments("read_acks");
    Group groups[MOST_GROUPS];
    Ack ack;
    Py_ssize_t group_count = 0;
    PyObject *replies = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(stop - at) * (around + 32));
    if (replies == NULL) return NULL;
    byte *start = (byte *)PyBytes_AS_STRING(replies), *end = start;
    for (; at < stop; at++) {
        if (!parse_ack(PyList_GET_ITEM(args[0], at), &ack, &opaque)) break;
        if ((code && ack.code != code) || group_count + ack.count > MOST_GROUPS) break;
        code = ack.code;
        add_groups(groups, &group_count, &ack);
        end = put_reply(end, args[3], opaque);
    }
    PyObject *list = _PyBytes_Resize(&replies, end - start) < 0 ? NULL : PyList_New(group_count);
    for (Py_ssize_t n = 0; list != NULL && n < group_count; n++) {
        PyObject *group = tuple_of(&groups[n]);
        if (group == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, n, group);
    }
    if (list != NULL) return Py_BuildValue("(LLNN)", (long long)at, (long long)code, list, replies);
    Py_XDECREF(replies);
    return NULL;
}
