/* Steps of the request path in C. docs/how-to/compiled.md says how they are built, downrange/compiled.py chooses.
 *
 * Each function does what the Python function or class of its name does. Some leave unusual input to Python: then they
 * return None and have changed nothing. Wrong arguments are a bug of the caller and raise TypeError. All calls hold the
 * GIL; those on a store belong to the store's thread.
 */
#ifndef DOWNRANGE_STEPS_H
#define DOWNRANGE_STEPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef unsigned char byte;

/* A piece of somebody else's bytes. */
typedef struct {
    const byte *at;
    Py_ssize_t size;
    int has_escapes, is_ascii;
} Text;

/* Names of attributes. */
extern PyObject *s_is_special, *s_queue_id, *s_row, *s_topic, *s_topic_field;

PyObject *cut_frames(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *next_run(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *write_records(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *put_entries(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *index_keys(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_records(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *follow_chain(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *timed_records(PyObject *module, PyObject *backlog);
PyObject *put_units(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *add_due(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *encode_pull(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *encode_pops(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *take_unread(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *cut_pops(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *add_checkpoints(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *add_acknowledgements(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *hold_leases(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *end_leases(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_acks(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *offset_list(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pick_all(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pick_by_tags(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pick_by_properties(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *first_usual(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *make_outgoing(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *make_send(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *make_batch(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *encode_send(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *take_stored_replies(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_usual(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *walk_records(PyObject *module, PyObject *buffer);
PyObject *read_heads(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *first_not_allowed(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *hmac_states(PyObject *module, PyObject *secret);
PyObject *split_properties(PyObject *module, PyObject *const *args, Py_ssize_t count);
int add_sockets(PyObject *module);
int add_new_messages(PyObject *module);
int add_sends(PyObject *module);

PyObject *frame_of_send(PyObject *pieces, const int64_t *numbers, const char *text, Py_ssize_t text_size, int64_t opaque,
                        PyObject *body, int64_t most);

Py_ssize_t whole_frames(const byte *start, Py_ssize_t size, int64_t max_length, int64_t max_header);
Py_ssize_t add_frames(PyObject *frames, const byte *at, Py_ssize_t size);

static inline byte *put16(byte *at, uint32_t value) {
    at[0] = (byte)(value >> 8), at[1] = (byte)value;
    return at + 2;
}

static inline byte *put32(byte *at, uint32_t value) { return put16(put16(at, value >> 16), value & 0xFFFF); }

static inline byte *put64(byte *at, uint64_t value) {
    return put32(put32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

static inline byte *put_bytes(byte *at, const void *from, Py_ssize_t size) {
    memcpy(at, from, (size_t)size);
    return at + size;
}

static inline byte *put_object(byte *at, PyObject *bytes) {
    return put_bytes(at, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
}

static inline uint32_t get32(const byte *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline int64_t get64(const byte *at) { return (int64_t)((uint64_t)get32(at) << 32 | get32(at + 4)); }

/* A Python int within [least, most]; 0 when it is something else, without an exception. */
static inline int as_number(PyObject *object, int64_t least, int64_t most, int64_t *number) {
    int overflow;
    if (object == NULL || !PyLong_CheckExact(object)) return 0;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow || value < least || value > most) return 0;
    *number = value;
    return 1;
}

/* An attribute that is such a number; 0 when it is something else, perhaps with an exception. */
static inline int number_of(PyObject *object, PyObject *name, int64_t least, int64_t most, int64_t *number) {
    PyObject *value = PyObject_GetAttr(object, name);
    int is_number = value != NULL && as_number(value, least, most, number);
    Py_XDECREF(value);
    return is_number;
}

static inline int as_int32(PyObject *object, int64_t *number) {
    return as_number(object, INT32_MIN, INT32_MAX, number);
}

static inline PyObject *three_numbers(int64_t first, int64_t second, int64_t third) {
    PyObject *tuple = PyTuple_New(3);
    const int64_t numbers[] = {first, second, third};
    for (int n = 0; tuple != NULL && n < 3; n++) {
        PyObject *number = PyLong_FromLongLong(numbers[n]);
        if (number == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, n, number);
    }
    return tuple;
}

/* None, unless an exception is on its way. */
static inline PyObject *refuse(void) {
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* A bug of the caller; NULL with a TypeError, unless an exception is on its way already. */
static inline PyObject *wrong_arguments(const char *name) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s: wrong arguments", name);
    return NULL;
}

/* The attribute as a new reference; NULL and no exception when there is none. */
static inline PyObject *attribute(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return value;
}

static inline int is_same_text(PyObject *one, PyObject *other) {
    return one == other || (PyUnicode_CheckExact(one) && PyUnicode_CheckExact(other) && PyUnicode_Compare(one, other) == 0);
}

static inline byte *put_decimal(byte *at, int64_t value) {
    byte digits[20];
    int count = 0;
    uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
    do digits[count++] = (byte)('0' + rest % 10); while (rest /= 10);
    if (value < 0) *at++ = '-';
    while (count > 0) *at++ = digits[--count];
    return at;
}

static inline byte *put_decimal_with_length(byte *at, int64_t value) {
    byte *end = put_decimal(at + 4, value);
    put32(at, (uint32_t)(end - at - 4));
    return end;
}

/* The numbers from `start` on that bits name, with commas between them. */
static inline byte *put_offsets(byte *at, int64_t start, int64_t bits) {
    for (int is_first = 1; bits != 0; bits >>= 1, start++) {
        if (!(bits & 1)) continue;
        if (!is_first) *at++ = ',';
        at = put_decimal(at, start);
        is_first = 0;
    }
    return at;
}

/* The bytes around the numbers; how many they are, or -1 when they are not so many pieces. */
static inline Py_ssize_t measure(PyObject *pieces, Py_ssize_t expected) {
    Py_ssize_t size = 0;
    if (!PyTuple_CheckExact(pieces) || PyTuple_GET_SIZE(pieces) != expected) return -1;
    for (Py_ssize_t n = 0; n < expected; n++) {
        PyObject *piece = PyTuple_GET_ITEM(pieces, n);
        if (!PyBytes_CheckExact(piece) || (size += PyBytes_GET_SIZE(piece)) > 1 << 20) return -1;
    }
    return size;
}

/* Queue entries, and the file of the log they point into: Backlog of store/queue/backlog.py. */
typedef struct {
    const byte *entries;
    Py_ssize_t count;
    int64_t start, readable;
    Py_buffer log;
} Backlog;

#define ENTRY_SIZE 20
#define COPY_BELOW (64 * 1024) /* records that are more than this go out as they lie in the log, if they can */

/* 0, an exception and nothing to close when the object is no backlog. */
int open_backlog(PyObject *object, Backlog *backlog);

/* Whether a record lies in the part of the file that may be read. */
int lies_within(const Backlog *backlog, int64_t offset, int64_t size);

/* Copy the records of a backlog, if they have at most so many bytes; where the copy ends, NULL for records that do not lie
   in the file one behind the other. */
byte *copy_backlog(byte *to, const Backlog *backlog, int64_t most, int64_t *copied);

/* Names of methods that the client's functions need, and of attributes of what pops found and of leases; 0 when memory
   ran out. */
int make_reply_names(void);
int make_pop_names(void);
int make_lease_names(void);
int make_table_names(void);

/* CRC-32 as zlib computes it; make the table before the first. */
void make_crc_table(void);
uint32_t crc32_of(const byte *at, Py_ssize_t size);

#endif
