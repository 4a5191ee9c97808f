/* Timer messages on their way into the index: timed_records and put_units of store/timer/timed_records.py. */
#include <stdatomic.h>
#include "properties.h"
#include "queue_tails.h"
#include "records.h"

#define MOST_DIGITS 18
#define UNIT_SIZE 52
#define SLOT_SIZE 32
#define DEFAULT 1
#define ROLL 2
#define DELETE 4
#define NO_POSITION (-1)
#define TIMED_ITEMS 7

static const char TIMER_TOPIC[] = "rmq_sys_wheel_timer";

/* --- timed_records --- */

static int parse_time(const Property *property, int64_t *time) {
    if (property->value_size > MOST_DIGITS) return 0;
    *time = 0;
    for (const byte *at = property->value; at < property->value + property->value_size; at++) {
        if (*at < '0' || *at > '9') return 0;
        *time = *time * 10 + (*at - '0');
    }
    return 1;
}

/* What the properties of a record say; 0 when they are unusual. */
static int read_properties(const Record *record, int64_t *time, Property *topic, int *is_delete) {
    const byte *at = record->properties, *end = at + record->properties_size;
    Property property;
    int has_time = 0;
    *topic = (Property){0}, *is_delete = 0;
    if (!is_utf8(at, record->properties_size)) return 0;
    while (next_property(&at, end, &property)) {
        if (has_name(&property, "TIMER_OUT_MS", 12)) {
            has_time = parse_time(&property, time);
            if (!has_time) return 0;
        } else if (has_name(&property, "REAL_TOPIC", 10)) *topic = property;
        else if (has_name(&property, "TIMER_DEL_UNIQKEY", 17)) *is_delete = 1;
    }
    return has_time && topic->name != NULL;
}

/* String.hashCode of a text in ASCII; 0 for another text. */
static int hash_ascii(const Property *text, int32_t *hash) {
    uint32_t found = 0;
    for (const byte *at = text->value; at < text->value + text->value_size; at++) {
        if (*at > 127) return 0;
        found = 31 * found + *at;
    }
    *hash = (int32_t)found;
    return 1;
}

/* What the index keeps of the record that an entry points to; NULL for an unusual one, perhaps with an exception. */
static PyObject *read_timed(const Backlog *backlog, const byte *entry, PyObject **last_topic) {
    Record record;
    Property topic = {0};
    int64_t offset = get64(entry), size = (int32_t)get32(entry + 8), time;
    int is_delete;
    int32_t hash;
    if (!lies_within(backlog, offset, size)
        || !read_record((const byte *)backlog->log.buf + (offset - backlog->start), (Py_ssize_t)size, &record)
        || record.size != size || record.topic_size != (Py_ssize_t)strlen(TIMER_TOPIC)
        || memcmp(record.topic, TIMER_TOPIC, strlen(TIMER_TOPIC)) || !read_properties(&record, &time, &topic, &is_delete)
        || !hash_ascii(&topic, &hash))
        return NULL;
    if (*last_topic == NULL || PyUnicode_GET_LENGTH(*last_topic) != topic.value_size
        || memcmp(PyUnicode_1BYTE_DATA(*last_topic), topic.value, (size_t)topic.value_size)) {
        Py_XSETREF(*last_topic, PyUnicode_DecodeASCII((const char *)topic.value, topic.value_size, NULL));
        if (*last_topic == NULL) return NULL;
    }
    return Py_BuildValue("(LLLLiOO)", (long long)time, (long long)record.store_timestamp, (long long)offset, (long long)size,
                         (int)hash, is_delete ? Py_True : Py_False, *last_topic);
}

/* backlog -> a tuple for each record up to the first unusual one */
PyObject *timed_records(PyObject *Py_UNUSED(module), PyObject *object) {
    Backlog backlog;
    PyObject *list = NULL, *topic = NULL;
    if (!open_backlog(object, &backlog)) return wrong_arguments("timed_records");
    list = PyList_New(0);
    for (Py_ssize_t n = 0; list != NULL && n < backlog.count; n++) {
        PyObject *timed = read_timed(&backlog, backlog.entries + n * ENTRY_SIZE, &topic);
        if (timed == NULL) break;
        if (PyList_Append(list, timed) < 0) Py_CLEAR(list);
        Py_DECREF(timed);
    }
    if (PyErr_Occurred()) Py_CLEAR(list);
    Py_XDECREF(topic);
    PyBuffer_Release(&backlog.log);
    return list;
}

/* --- put_units --- */

/* Where units go and by which rules. */
typedef struct {
    Py_buffer wheel, part;
    int64_t slots, start, end, limit; /* the part of the timer log begins at `start`; units end before `limit` */
    int64_t precision, window, rest, half_window, earliest, read_time;
    int64_t last_tick;
} Putting;

static int64_t floor_of(const Putting *to, int64_t time) { return time - time % to->precision; }

/* Put one unit; 0 for a record that is left to Python. */
static int put_unit(Putting *to, const int64_t *numbers, int is_delete) {
    int64_t out_time = numbers[0], write_time = floor_of(to, numbers[1]), slot_time = out_time, ahead = out_time - write_time;
    uint32_t magic = DEFAULT | (is_delete ? DELETE : 0);
    if (to->end + UNIT_SIZE > to->limit) return 0;
    if (ahead >= to->window) {
        magic |= ROLL;
        slot_time = write_time + (ahead - to->window < to->rest ? to->half_window : to->window);
    }
    slot_time = floor_of(to, slot_time);
    if (slot_time < to->earliest) slot_time = to->earliest;
    int64_t delay = slot_time - write_time;
    if (slot_time - to->read_time >= to->slots * to->precision || delay < INT32_MIN || delay > INT32_MAX) return 0;
    int64_t tick = slot_time / to->precision;
    byte *slot = (byte *)to->wheel.buf + tick % to->slots * SLOT_SIZE;
    int is_used = (int64_t)get64(slot) == tick;
    int64_t first = is_used ? (int64_t)get64(slot + 8) : to->end, last = is_used ? (int64_t)get64(slot + 16) : NO_POSITION;
    int32_t waiting = is_used ? (int32_t)get32(slot + 24) : 0;
    byte *unit = (byte *)to->part.buf + (to->end - to->start);
    byte *at = put64(put32(put64(unit + 4, (uint64_t)last), magic), (uint64_t)write_time);
    at = put64(put32(at, (uint32_t)delay), (uint64_t)numbers[2]);
    put64(put32(put32(at, (uint32_t)numbers[3]), (uint32_t)numbers[4]), 0);
    atomic_thread_fence(memory_order_release); /* a process that dies here leaves no unit, and no slot without its unit */
    put32(unit, UNIT_SIZE);
    atomic_thread_fence(memory_order_release);
    slot = put64(put64(put64(slot, (uint64_t)tick), (uint64_t)first), (uint64_t)to->end);
    put32(put32(slot, (uint32_t)(waiting + (is_delete ? -1 : 1))), 0);
    to->end += UNIT_SIZE;
    if (tick > to->last_tick) to->last_tick = tick;
    return 1;
}

static int read_numbers(PyObject *tuple, int64_t *numbers, Py_ssize_t count) {
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) < count) return 0;
    for (Py_ssize_t n = 0; n < count; n++)
        if (!as_number(PyTuple_GET_ITEM(tuple, n), INT32_MIN, INT64_MAX / 4, &numbers[n])) return 0;
    return 1;
}

/* records, at, wheel, (slots, last tick), part of the timer log, (start, end, limit), (precision, window, rest, half window,
   earliest, read time) -> position of the first record that was not put, end, last tick */
PyObject *put_units(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, places[3], wheel[2], rules[6], numbers[5];
    Putting to = {0};
    PyObject *result = NULL;
    if (count != 7 || !PyList_CheckExact(args[0]) || !as_number(args[1], 0, PyList_GET_SIZE(args[0]), &at)
        || !read_numbers(args[3], wheel, 2) || !read_numbers(args[5], places, 3) || !read_numbers(args[6], rules, 6)
        || wheel[0] < 1 || rules[0] < 1 || rules[4] < 0 || places[0] < 0 || places[1] < places[0])
        return wrong_arguments("put_units");
    to.slots = wheel[0], to.last_tick = wheel[1], to.start = places[0], to.end = places[1], to.limit = places[2];
    to.precision = rules[0], to.window = rules[1], to.rest = rules[2], to.half_window = rules[3], to.earliest = rules[4];
    to.read_time = rules[5];
    if (!take_buffer(args[2], &to.wheel) || !take_buffer(args[4], &to.part) || to.slots > to.wheel.len / SLOT_SIZE
        || to.limit - to.start > to.part.len) {
        wrong_arguments("put_units");
        goto end;
    }
    for (; at < PyList_GET_SIZE(args[0]); at++) {
        PyObject *timed = PyList_GET_ITEM(args[0], at);
        if (!read_numbers(timed, numbers, 5) || PyTuple_GET_SIZE(timed) != TIMED_ITEMS || numbers[0] < 0 || numbers[1] < 0
            || !put_unit(&to, numbers, PyTuple_GET_ITEM(timed, 5) == Py_True))
            break;
    }
    result = Py_BuildValue("(LLL)", (long long)at, (long long)to.end, (long long)to.last_tick);
end:
    if (to.wheel.obj != NULL) PyBuffer_Release(&to.wheel);
    if (to.part.obj != NULL) PyBuffer_Release(&to.part);
    return result;
}
