/* Timer messages that are due: follow_chain of store/timer/timer_log.py, add_due of broker/due_messages.py. */
#include "new_messages.h"
#include "queue_tails.h"
#include "topic_table.h"

/* A unit of the timer log. */
enum { PREVIOUS_AT = 4, UNIT_MAGIC_AT = 12, WRITE_TIME_AT = 16, UNIT_OFFSET_AT = 28, UNIT_SIZE = 52 };
enum { ROLL = 2, DELETE = 4, MOST_MAGIC = 15 };
#define NO_POSITION (-1)
#define MOST_UNITS (1 << 20)

/* memory, start, position, units -> the next position, messages, rolls, deletions */
PyObject *follow_chain(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t start, position, most;
    Py_buffer memory;
    if (count != 4 || !as_number(args[1], 0, INT64_MAX / 2, &start) || !as_number(args[2], start, INT64_MAX / 2, &position)
        || !as_number(args[3], 0, MOST_UNITS, &most))
        return wrong_arguments("follow_chain");
    if (PyObject_GetBuffer(args[0], &memory, PyBUF_SIMPLE) < 0) return NULL;
    /* Two numbers for each message and roll, one for each deletion: each kind from one end of its own third. */
    byte *found = PyMem_Malloc((size_t)(5 * most + 1) * sizeof(int64_t));
    byte *messages = found, *rolls = found + 16 * most, *deletes = found + 32 * most;
    PyObject *result = NULL;
    if (found == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (int64_t n = 0; n < most && position >= start && position - start < memory.len; n++) {
        const byte *unit = (const byte *)memory.buf + (position - start);
        uint32_t magic = 0;
        if (position - start <= memory.len - UNIT_SIZE && get32(unit) == UNIT_SIZE) magic = get32(unit + UNIT_MAGIC_AT);
        if (magic == 0 || magic > MOST_MAGIC) {
            position = NO_POSITION;
            break;
        }
        int64_t offset = get64(unit + UNIT_OFFSET_AT), previous = get64(unit + PREVIOUS_AT);
        if ((magic & (ROLL | DELETE)) == DELETE) put_native(deletes, offset), deletes += 8;
        else {
            byte **to = magic & ROLL ? &rolls : &messages;
            put_native(*to, offset), put_native(*to + 8, get64(unit + WRITE_TIME_AT)), *to += 16;
        }
        position = previous >= 0 && previous < position ? previous : NO_POSITION;
    }
    result = Py_BuildValue("(Ly#y#y#)", (long long)position, found, (Py_ssize_t)(messages - found), found + 16 * most,
                           (Py_ssize_t)(rolls - found - 16 * most), found + 32 * most,
                           (Py_ssize_t)(deletes - found - 32 * most));
end:
    PyMem_Free(found);
    PyBuffer_Release(&memory);
    return result;
}

/* --- add_due --- */

static const char TIMER_TOPIC[] = "rmq_sys_wheel_timer", HALF_TOPIC[] = "RMQ_SYS_TRANS_HALF_TOPIC";
static const char OUT_TIME[] = "TIMER_OUT_MS\x01", REAL_TOPIC[] = "REAL_TOPIC\x01", REAL_QID[] = "REAL_QID\x01";
static const char ENQUEUED[] = "\x02TIMER_ENQUEUE_MS\x01", DEQUEUED[] = "\x02TIMER_DEQUEUE_MS\x01", A_TIME[] = "QUEUE_MS\x01";
#define LENGTH(text) ((Py_ssize_t)sizeof(text) - 1)
#define LONGEST_TOPIC 127
#define LONGEST_PROPERTIES 32767
#define MOST_DIGITS 9
#define LONGEST_NUMBER 20
#define BYTES_OF_WORK 1024

typedef struct {
    NewMessages *batch;
    PyObject *by_topic, *log, *deleted; /* borrowed */
    TopicTable *rows;
    const byte *start; /* of a file of the log, of which so many bytes may be read */
    int64_t offset, readable, slot_time, now, fits;
} Adding;

/* Where a message goes, as the last three of its properties say. */
typedef struct {
    const byte *out_time, *topic;
    Py_ssize_t out_time_size, topic_size;
    int64_t queue_id;
} Real;

/* The value of the last property before `*end`, if it has this name (with the byte behind it); `*end` moves before it. */
static const byte *last_value(const byte *start, const byte **end, const char *name, Py_ssize_t name_size, Py_ssize_t *size) {
    const byte *at = *end;
    while (at > start && at[-1] != 2) at--;
    if (*end - at <= name_size || memcmp(at, name, (size_t)name_size)) return NULL;
    *size = *end - at - name_size;
    if (at == start) return NULL;
    *end = at - 1;
    return at + name_size;
}

static int is_text(const byte *at, Py_ssize_t size, const char *text, Py_ssize_t text_size) {
    return size == text_size && !memcmp(at, text, (size_t)size);
}

/* 0 when the properties do not end as those that a broker of ours has set aside. */
static int find_real(const Record *record, Real *real) {
    const byte *start = record->properties, *end = start + record->properties_size;
    Py_ssize_t digits;
    const byte *number = last_value(start, &end, REAL_QID, LENGTH(REAL_QID), &digits);
    if (number == NULL || digits > MOST_DIGITS) return 0;
    real->topic = last_value(start, &end, REAL_TOPIC, LENGTH(REAL_TOPIC), &real->topic_size);
    if (real->topic == NULL || real->topic_size > LONGEST_TOPIC) return 0;
    real->out_time = last_value(start, &end, OUT_TIME, LENGTH(OUT_TIME), &real->out_time_size);
    if (real->out_time == NULL) return 0;
    real->queue_id = 0;
    for (; digits > 0; digits--, number++) {
        if (*number < '0' || *number > '9') return 0;
        real->queue_id = real->queue_id * 10 + (*number - '0');
    }
    return !is_text(real->topic, real->topic_size, TIMER_TOPIC, LENGTH(TIMER_TOPIC))
        && !is_text(real->topic, real->topic_size, HALF_TOPIC, LENGTH(HALF_TOPIC));
}

/* Whether a deletion names the message; 0 too when that is not known, with an exception or without a unique key. */
static int is_kept(const Adding *adding, const Message *message, const Real *real) {
    if (PySet_GET_SIZE(adding->deleted) == 0) return 1;
    if (message->unique_key.size == 0) return 0;
    const char *unique_key = (const char *)properties_of(adding->batch, message) + message->unique_key.at;
    PyObject *topic = PyUnicode_DecodeUTF8((const char *)real->topic, real->topic_size, NULL);
    PyObject *key = PyUnicode_DecodeUTF8(unique_key, message->unique_key.size, NULL);
    PyObject *whole = topic == NULL || key == NULL ? NULL : PyUnicode_FromFormat("%U+%U", topic, key);
    int is_deleted = whole == NULL ? -1 : PySet_Contains(adding->deleted, whole);
    Py_XDECREF(topic);
    Py_XDECREF(key);
    Py_XDECREF(whole);
    return is_deleted == 0;
}

/* The properties of a record, and when it was put on the wheel and taken from it; their size, 0 with an exception. */
static Py_ssize_t put_properties(const Adding *adding, const Record *record, const Real *real, int64_t write_time) {
    byte digits[LONGEST_NUMBER];
    Py_ssize_t slot_size = put_decimal(digits, adding->slot_time) - digits;
    int was_late = real->out_time_size != slot_size || memcmp(real->out_time, digits, (size_t)slot_size) != 0;
    Py_ssize_t most = record->properties_size + LENGTH(ENQUEUED) + LENGTH(DEQUEUED) + 2 * LONGEST_NUMBER;
    byte *text = room_for_text(adding->batch, most);
    if (text == NULL) return 0;
    byte *at = put_bytes(text, record->properties, record->properties_size);
    at = put_decimal(put_bytes(at, ENQUEUED, LENGTH(ENQUEUED)), was_late ? INT64_MAX : write_time);
    at = put_decimal(put_bytes(at, DEQUEUED, LENGTH(DEQUEUED)), adding->now);
    adding->batch->text_size -= most - (at - text);
    return at - text;
}

/* Add the message of one unit; the bytes of it, or -1 when it is not usual, or with an exception. */
static int64_t add_message_of(const Adding *adding, int64_t offset, int64_t write_time) {
    Record record;
    Real real;
    NewMessages *batch = adding->batch;
    int64_t at = offset - adding->offset;
    if (offset < adding->offset || at >= adding->readable
        || !read_record(adding->start + at, (Py_ssize_t)(adding->readable - at), &record)
        || !is_text(record.topic, record.topic_size, TIMER_TOPIC, LENGTH(TIMER_TOPIC)) || record.sys_flag & NOT_IN_A_QUEUE
        || !find_real(&record, &real) || !is_utf8(record.properties, record.properties_size)
        || memmem(record.properties, (size_t)record.properties_size, A_TIME, (size_t)LENGTH(A_TIME)) != NULL)
        return -1;
    uint32_t hash = hash_topic(adding->rows, real.topic, real.topic_size);
    int64_t row = find_row(adding->by_topic, adding->rows, hash, real.topic, real.topic_size, real.queue_id);
    if (row < 0) return -1;
    Py_ssize_t topic_at = batch->text_size;
    byte *topic = room_for_text(batch, 1 + real.topic_size);
    if (topic == NULL) return -1;
    *topic = (byte)real.topic_size;
    put_bytes(topic + 1, real.topic, real.topic_size);
    Py_ssize_t size = put_properties(adding, &record, &real, write_time);
    if (size == 0 || size > LONGEST_PROPERTIES || size + record.body_size > adding->fits) return -1;
    Message *message = add_message(batch, size);
    if (message == NULL || !is_kept(adding, message, &real)) return -1;
    message->topic_at = topic_at, message->topic_size = 1 + real.topic_size;
    message->row = row, message->queue_id = real.queue_id;
    message->body = record.body, message->body_size = record.body_size;
    message->born_host = record.start + BORN_HOST_AT, message->born_host_size = 8 + record.born_extra;
    message->store_host = record.start + STORE_HOST_AT + record.born_extra, message->store_host_size = 8 + record.store_extra;
    message->flag = (int32_t)get32(record.start + FLAG_AT), message->sys_flag = (int32_t)record.sys_flag;
    message->born_timestamp = get64(record.start + BORN_TIMESTAMP_AT);
    message->reconsume_times = (int32_t)get32(record.start + RECONSUME_TIMES_AT + record.born_extra + record.store_extra);
    message->begins_group = 1;
    return size + record.body_size;
}

/* Add messages from unit `at - 1` down; the first that was not added stays below `at`. 0 with an exception. */
static int add_units(const Adding *adding, const Py_buffer *units, int64_t *at, int64_t *work) {
    NewMessages *batch = adding->batch;
    if (*at > 0 && *work > 0 && !keep_object(batch, adding->log)) return 0;
    while (*at > 0 && *work > 0) {
        const byte *unit = (const byte *)units->buf + 16 * (*at - 1);
        Py_ssize_t messages = batch->count, text_size = batch->text_size;
        int64_t size = add_message_of(adding, get_native(unit), get_native(unit + 8));
        if (size < 0) {
            cut_messages(batch, messages, text_size, batch->kept_count);
            return !PyErr_Occurred();
        }
        --*at, *work -= 1 + size / BYTES_OF_WORK;
    }
    return 1;
}

/* messages, units, at, work, (file, its offset, readable), (tick, now, deleted), queues, fits -> at, work */
PyObject *add_due(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, work;
    Adding adding = {.batch = count == 8 ? as_messages(args[0]) : NULL};
    if (adding.batch == NULL || adding.batch->stored > 0 || !as_number(args[2], 0, INT64_MAX / 16, &at)
        || !as_number(args[3], INT64_MIN, INT64_MAX, &work) || !PyTuple_Check(args[4]) || PyTuple_GET_SIZE(args[4]) != 3
        || !PyTuple_Check(args[5]) || PyTuple_GET_SIZE(args[5]) != 3 || !as_number(args[7], 0, INT32_MAX, &adding.fits))
        return wrong_arguments("add_due");
    adding.log = PyTuple_GET_ITEM(args[4], 0), adding.deleted = PyTuple_GET_ITEM(args[5], 2);
    if (!PyMemoryView_Check(adding.log) || !as_number(PyTuple_GET_ITEM(args[4], 1), 0, INT64_MAX / 2, &adding.offset)
        || !as_number(PyTuple_GET_ITEM(args[4], 2), 0, INT64_MAX / 2, &adding.readable)
        || !as_number(PyTuple_GET_ITEM(args[5], 0), 0, INT64_MAX, &adding.slot_time)
        || !as_number(PyTuple_GET_ITEM(args[5], 1), 0, INT64_MAX, &adding.now) || !PySet_CheckExact(adding.deleted))
        return wrong_arguments("add_due");
    Py_buffer units, log = {0};
    if (PyObject_GetBuffer(args[1], &units, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *by_topic = PyObject_GetAttrString(args[6], "by_raw_topic");
    PyObject *rows = by_topic == NULL ? NULL : PyObject_GetAttrString(args[6], "rows_by_topic");
    PyObject *by_row = rows == NULL ? NULL : PyObject_GetAttrString(args[6], "by_row");
    int is_done = 0;
    if (by_row != NULL && PyObject_GetBuffer(adding.log, &log, PyBUF_SIMPLE) == 0) {
        if (!PyDict_CheckExact(by_topic) || !Py_IS_TYPE(rows, &topic_table_type) || !PyList_CheckExact(by_row)
            || adding.readable > log.len || at > units.len / 16)
            wrong_arguments("add_due");
        else {
            adding.by_topic = by_topic, adding.rows = (TopicTable *)rows, adding.start = log.buf;
            if (adding.batch->by_row == NULL) adding.batch->by_row = Py_NewRef(by_row);
            is_done = add_units(&adding, &units, &at, &work);
        }
    }
    Py_XDECREF(by_topic);
    Py_XDECREF(rows);
    Py_XDECREF(by_row);
    if (log.obj != NULL) PyBuffer_Release(&log);
    PyBuffer_Release(&units);
    return is_done ? Py_BuildValue("(LL)", (long long)at, (long long)work) : NULL;
}
