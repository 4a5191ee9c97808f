/* From messages to requests: make_outgoing, make_send and make_batch of client/producer/outgoing.py. */
#include "steps.h"

#include <structmember.h>

#define TEXT_ROOM 8191 /* longer properties may exceed what a message can have: that is for Python to check */
#define ENTRY_FIXED 22

enum { TOPIC, BODY, TAGS, KEYS, FLAG, PROPERTIES, DELAY_LEVEL, SHARDING_KEY, WAIT, AT, AFTER, ATTRIBUTES };
static const char *const ATTRIBUTE_NAMES[] = {
    "topic", "body", "tags", "keys", "flag", "properties", "delay_level", "sharding_key", "wait_store_msg_ok",
    "deliver_at", "deliver_after",
};
/* Where the attributes lie in a message: looking them up by name would take as long as all the rest. */
static Py_ssize_t slots[ATTRIBUTES];
static PyTypeObject *slots_of;

static int find_slots(PyTypeObject *type) {
    if (type == slots_of) return 1;
    Py_CLEAR(slots_of);
    for (int n = 0; n < ATTRIBUTES; n++) {
        PyObject *found = PyDict_GetItemString(type->tp_dict, ATTRIBUTE_NAMES[n]);
        if (found == NULL || !Py_IS_TYPE(found, &PyMemberDescr_Type)) return 0;
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (PyDescr_TYPE(found) != type || member->type != T_OBJECT_EX) return 0;
        slots[n] = member->offset;
    }
    slots_of = (PyTypeObject *)Py_NewRef((PyObject *)type);
    return 1;
}

typedef struct {
    char at[TEXT_ROOM];
    Py_ssize_t size;
} Properties;

static int put_text(Properties *text, const char *from, Py_ssize_t size) {
    if (size > TEXT_ROOM - text->size) return 0;
    memcpy(text->at + text->size, from, (size_t)size);
    text->size += size;
    return 1;
}

static int is_ascii_text(PyObject *object) { return PyUnicode_CheckExact(object) && PyUnicode_IS_COMPACT_ASCII(object); }

/* Puts text that is not empty and holds no separator; 0 for any other value. */
static int put_checked(Properties *text, PyObject *value) {
    if (!is_ascii_text(value)) return 0;
    const char *at = (const char *)PyUnicode_1BYTE_DATA(value);
    Py_ssize_t size = PyUnicode_GET_LENGTH(value);
    return size > 0 && !memchr(at, 1, (size_t)size) && !memchr(at, 2, (size_t)size) && put_text(text, at, size);
}

static int is_nothing(PyObject *value) {
    return value == Py_None || (PyUnicode_CheckExact(value) && PyUnicode_GET_LENGTH(value) == 0);
}

static int put_optional(Properties *text, const char *name, PyObject *value) {
    if (is_nothing(value)) return 1;
    return put_text(text, name, (Py_ssize_t)strlen(name)) && put_checked(text, value) && put_text(text, "\2", 1);
}

/* A level behind the usual ones is for Python, which warns of it. */
static int put_delay(Properties *text, PyObject *level) {
    int64_t number;
    byte digits[24];
    if (!as_number(level, 0, 18, &number)) return 0;
    return number == 0 || (put_text(text, "DELAY\1", 6)
                           && put_text(text, (char *)digits, put_decimal(digits, number) - digits) && put_text(text, "\2", 1));
}

static int put_others(Properties *text, PyObject *properties, PyObject *reserved) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    if (!PyDict_CheckExact(properties)) return 0;
    while (PyDict_Next(properties, &at, &name, &value))
        if (!put_checked(text, name) || PySet_Contains(reserved, name) != 0 || !put_text(text, "\1", 1)
            || !put_checked(text, value) || !put_text(text, "\2", 1))
            return 0;
    return 1;
}

/* A new text: `text` and the last hex digits of `number`. NULL with an exception. */
static PyObject *with_digits(PyObject *text, int64_t number, int digits) {
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    PyObject *result = PyUnicode_New(size + digits, 127);
    if (result == NULL) return NULL;
    byte *at = put_bytes(PyUnicode_1BYTE_DATA(result), PyUnicode_1BYTE_DATA(text), size);
    for (int shift = 4 * digits - 4; shift >= 0; shift -= 4) *at++ = (byte)"0123456789ABCDEF"[number >> shift & 15];
    return result;
}

/* The unique id: a stem and the last four hex digits of a number. */
static PyObject *unique_id(PyObject *stem, int64_t number) { return with_digits(stem, number, 4); }

static int put_last(Properties *text, PyObject *last) {
    return is_ascii_text(last) && put_text(text, (const char *)PyUnicode_1BYTE_DATA(last), PyUnicode_GET_LENGTH(last));
}

static int put_properties(Properties *text, PyObject *const *values, PyObject *id, PyObject *reserved) {
    int waits = values[WAIT] == Py_True;
    text->size = 0;
    return (waits || values[WAIT] == Py_False) && put_text(text, "UNIQ_KEY\1", 9) && put_checked(text, id)
        && put_text(text, waits ? "\2WAIT\1true\2" : "\2WAIT\1false\2", waits ? 11 : 12)
        && put_optional(text, "TAGS\1", values[TAGS]) && put_optional(text, "KEYS\1", values[KEYS])
        && put_delay(text, values[DELAY_LEVEL]) && put_optional(text, "__SHARDINGKEY\1", values[SHARDING_KEY])
        && put_others(text, values[PROPERTIES], reserved);
}

/* The OutgoingRules of a producer. */
typedef struct {
    PyTypeObject *message_type;
    PyObject *type, *code, *batch_code, *reserved, *last;
    int64_t largest, compressed, longest_frame;
} Rules;

static int take_rules(PyObject *object, Rules *rules) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < 9) return 0;
    PyObject *const *values = &PyTuple_GET_ITEM(object, 0);
    rules->message_type = (PyTypeObject *)values[0];
    rules->type = values[1], rules->code = values[2], rules->batch_code = values[3];
    rules->reserved = values[6], rules->last = values[7];
    return PyType_Check(values[0]) && as_number(values[4], 0, INT32_MAX, &rules->largest)
        && as_number(values[5], 0, INT64_MAX, &rules->compressed) && PyFrozenSet_CheckExact(rules->reserved)
        && PyUnicode_CheckExact(rules->last) && as_number(values[8], 0, INT32_MAX, &rules->longest_frame);
}

static void drop(PyObject **values, int count) {
    while (count-- > 0) Py_CLEAR(values[count]);
}

/* The attributes of a message as new references. 0, and no references, when it is not a Message, its body is unusual, or it is timed. */
static int take_message(PyObject *message, const Rules *rules, PyObject **values) {
    if (!Py_IS_TYPE(message, rules->message_type) || !find_slots(rules->message_type)) return 0;
    for (int n = 0; n < ATTRIBUTES; n++)
        if ((values[n] = Py_XNewRef(*(PyObject **)((char *)message + slots[n]))) == NULL) {
            drop(values, n);
            return 0;
        }
    if (PyBytes_CheckExact(values[BODY]) && PyBytes_GET_SIZE(values[BODY]) > 0
        && PyBytes_GET_SIZE(values[BODY]) <= rules->largest && values[AT] == Py_None && values[AFTER] == Py_None)
        return 1;
    drop(values, ATTRIBUTES);
    return 0;
}

/* Outgoing(code, topic, body, 0, flag, properties, ids, messages, now). Owns `ids` and `messages`, which may be NULL. */
static PyObject *outgoing_of(PyObject *type, PyObject *code, PyObject *topic, PyObject *body, PyObject *flag,
                             const Properties *text, PyObject *ids, PyObject *messages, PyObject *now) {
    PyObject *properties = PyUnicode_New(text->size, 127), *zero = PyLong_FromLong(0), *result = NULL;
    if (properties != NULL && zero != NULL && ids != NULL && messages != NULL) {
        memcpy(PyUnicode_1BYTE_DATA(properties), text->at, (size_t)text->size);
        PyObject *fields[] = {code, topic, body, zero, flag, properties, ids, messages, now};
        result = PyObject_Vectorcall(type, fields, 9, NULL);
    }
    Py_XDECREF(properties), Py_XDECREF(zero), Py_XDECREF(ids), Py_XDECREF(messages);
    return result;
}

/* make_outgoing(message, topic, stem, number, now, rules) -> Outgoing */
PyObject *make_outgoing(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t number;
    Rules rules;
    PyObject *values[ATTRIBUTES], *id, *result = NULL;
    Properties text;
    if (count != 6 || !is_ascii_text(args[2]) || !as_number(args[3], 0, INT64_MAX, &number) || !take_rules(args[5], &rules))
        return wrong_arguments("make_outgoing");
    if (!take_message(args[0], &rules, values)) return refuse();
    if (PyBytes_GET_SIZE(values[BODY]) < rules.compressed && (id = unique_id(args[2], number)) != NULL) {
        if (put_properties(&text, values, id, rules.reserved) && put_last(&text, rules.last))
            result = outgoing_of(rules.type, rules.code, args[1], values[BODY], values[FLAG], &text,
                                 PyTuple_Pack(1, id), PyTuple_Pack(1, args[0]), args[4]);
        Py_DECREF(id);
    }
    drop(values, ATTRIBUTES);
    return result != NULL ? result : refuse();
}

/* The fields of an IdMonth, up to the function that gives numbers. */
typedef struct {
    PyObject *prefix, *next_number;
    int64_t start, end;
} Month;

static int take_month(PyObject *object, Month *month) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < 4) return 0;
    month->prefix = PyTuple_GET_ITEM(object, 0), month->next_number = PyTuple_GET_ITEM(object, 3);
    return is_ascii_text(month->prefix) && as_number(PyTuple_GET_ITEM(object, 1), 0, INT64_MAX, &month->start)
        && as_number(PyTuple_GET_ITEM(object, 2), 0, INT64_MAX, &month->end);
}

/* The next id of a month; NULL without an exception when `now` is not in it. */
static PyObject *id_born(const Month *month, int64_t now) {
    int64_t number;
    PyObject *next = NULL, *id = NULL;
    if (now < month->start || now >= month->end || (next = PyObject_CallNoArgs(month->next_number)) == NULL) return NULL;
    if (as_number(next, 0, INT64_MAX, &number))
        id = with_digits(month->prefix, ((now - month->start) & 0xFFFFFFFF) << 16 | (number & 0xFFFF), 12);
    Py_DECREF(next);
    return id;
}

/* Is it a Target: queue, address of its broker, the fixed parts of a frame? */
static int is_target(PyObject *target) {
    if (!PyTuple_Check(target) || PyTuple_GET_SIZE(target) != 3) return 0;
    PyObject *queue = PyTuple_GET_ITEM(target, 0);
    return PyTuple_Check(queue) && PyTuple_GET_SIZE(queue) == 3 && PyTuple_CheckExact(PyTuple_GET_ITEM(target, 2));
}

/* make_send(message, topic, month, nanoseconds, rules, target, opaque) -> Outgoing, frame, (id, topic, queue) */
PyObject *make_send(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t nanoseconds, opaque, numbers[4] = {0};
    Rules rules;
    Month month;
    PyObject *values[ATTRIBUTES], *id = NULL, *now = NULL, *frame = NULL, *ready = NULL, *expected = NULL, *result = NULL;
    Properties text;
    if (count != 7 || !take_month(args[2], &month) || !as_number(args[3], 0, INT64_MAX, &nanoseconds)
        || !take_rules(args[4], &rules) || !is_target(args[5]) || !as_int32(args[6], &opaque))
        return wrong_arguments("make_send");
    PyObject *queue = PyTuple_GET_ITEM(args[5], 0), *pieces = PyTuple_GET_ITEM(args[5], 2);
    if (!take_message(args[0], &rules, values)) return refuse();
    numbers[2] = nanoseconds / 1000000;
    if (PyBytes_GET_SIZE(values[BODY]) < rules.compressed && as_int32(PyTuple_GET_ITEM(queue, 2), &numbers[0])
        && as_int32(values[FLAG], &numbers[3]) && (id = id_born(&month, numbers[2])) != NULL
        && put_properties(&text, values, id, rules.reserved) && put_last(&text, rules.last)
        && (now = PyLong_FromLongLong(numbers[2])) != NULL
        && (frame = frame_of_send(pieces, numbers, text.at, text.size, opaque, values[BODY], rules.longest_frame)) != NULL
        && (expected = PyTuple_Pack(3, id, values[TOPIC], queue)) != NULL
        && (ready = outgoing_of(rules.type, rules.code, args[1], values[BODY], values[FLAG], &text, PyTuple_Pack(1, id),
                                PyTuple_Pack(1, args[0]), now)) != NULL)
        result = PyTuple_Pack(3, ready, frame, expected);
    Py_XDECREF(id), Py_XDECREF(now), Py_XDECREF(frame), Py_XDECREF(expected), Py_XDECREF(ready);
    drop(values, ATTRIBUTES);
    return result != NULL ? result : refuse();
}

/* The entries of a batch so far, and how many bytes one request may hold. */
typedef struct {
    byte *at;
    Py_ssize_t size, room, most;
} Entries;

/* 0 when the entry does not fit the request, or with an exception. */
static int put_entry(Entries *entries, uint32_t flag, PyObject *body, const Properties *text) {
    Py_ssize_t body_size = PyBytes_GET_SIZE(body), size = ENTRY_FIXED + body_size + text->size;
    if (size > entries->most - entries->size) return 0;
    if (size > entries->room - entries->size) {
        Py_ssize_t room = 2 * (entries->size + size);
        byte *memory = PyMem_Realloc(entries->at, (size_t)room);
        if (memory == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        entries->at = memory, entries->room = room;
    }
    byte *at = entries->at + entries->size;
    at = put32(put32(put32(at, (uint32_t)size), 0), 0); /* size, magic, checksum */
    at = put_object(put32(put32(at, flag), (uint32_t)body_size), body);
    put_bytes(put16(at, (uint32_t)text->size), text->at, text->size);
    entries->size += size;
    return 1;
}

/* Puts one message of a batch and returns its id; NULL when the message is unusual. `waits` is the wait flag of the messages
   before it, NULL for the first. */
static PyObject *put_member(Entries *entries, PyObject *message, PyObject *topic, PyObject *stem, PyObject *counter,
                            const Rules *rules, PyObject **waits) {
    PyObject *values[ATTRIBUTES], *id = NULL, *number = NULL;
    Properties text;
    int64_t next, flag, level;
    if (!take_message(message, rules, values)) return NULL;
    if (*waits == NULL) *waits = values[WAIT]; /* put_properties takes True and False only, which live for ever */
    int is_good = is_same_text(values[TOPIC], topic) && values[WAIT] == *waits
        && as_number(values[DELAY_LEVEL], 0, 0, &level) && as_int32(values[FLAG], &flag)
        && (number = PyObject_CallNoArgs(counter)) != NULL && as_number(number, 0, INT64_MAX, &next)
        && (id = unique_id(stem, next)) != NULL && put_properties(&text, values, id, rules->reserved)
        && put_entry(entries, (uint32_t)flag, values[BODY], &text);
    if (!is_good) Py_CLEAR(id);
    Py_XDECREF(number);
    drop(values, ATTRIBUTES);
    return id;
}

/* make_batch(messages, topic, wire_topic, stem, next_number, now, rules) -> (Outgoing,) */
PyObject *make_batch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Rules rules;
    PyObject *waits = NULL, *result = NULL;
    Properties text = {.size = 0};
    if (count != 7 || !PyTuple_CheckExact(args[0]) || !is_ascii_text(args[3]) || !take_rules(args[6], &rules))
        return wrong_arguments("make_batch");
    if (PyTuple_GET_SIZE(args[0]) == 0 || !is_ascii_text(args[1])
        || !strncmp((const char *)PyUnicode_1BYTE_DATA(args[1]), "%RETRY%", 7)) /* no batch may be sent there */
        return refuse();
    Py_ssize_t length = PyTuple_GET_SIZE(args[0]), n = 0;
    Entries entries = {.most = (Py_ssize_t)rules.largest};
    PyObject *ids = PyTuple_New(length);
    if (ids == NULL) return NULL;
    for (; n < length; n++) {
        PyObject *id = put_member(&entries, PyTuple_GET_ITEM(args[0], n), args[1], args[3], args[4], &rules, &waits);
        if (id == NULL) break;
        PyTuple_SET_ITEM(ids, n, id);
    }
    if (n == length && put_text(&text, "WAIT\1", 5)
        && put_text(&text, waits == Py_True ? "true\2" : "false\2", waits == Py_True ? 5 : 6) && put_last(&text, rules.last)) {
        PyObject *body = PyBytes_FromStringAndSize((char *)entries.at, entries.size), *zero = PyLong_FromLong(0);
        if (body != NULL && zero != NULL)
            result = outgoing_of(rules.type, rules.batch_code, args[2], body, zero, &text, Py_NewRef(ids), Py_NewRef(args[0]),
                                 args[5]);
        Py_XDECREF(body), Py_XDECREF(zero);
    }
    Py_DECREF(ids);
    PyMem_Free(entries.at);
    if (result == NULL) return refuse();
    PyObject *requests = PyTuple_Pack(1, result);
    Py_DECREF(result);
    return requests;
}
