/* From records of the log to a batch of messages that can be applied: store/bulk_replay.py. */
#include "new_messages.h"
#include "queue_tails.h"
#include "topic_table.h"

#define AHEAD 16 /* records that are read before the first of them is looked up */
#define MOST 1024 /* messages of one batch */

typedef struct {
    PyObject *by_topic; /* queues by raw topic and id; NULL: any queue will do */
    TopicTable *rows;   /* the rows of queues that were found there before */
    NewMessages *batch;
} Reading;

static int64_t row_of(const Reading *reading, const Record *record) {
    return find_row(reading->by_topic, reading->rows, record->topic_hash, record->topic, record->topic_size, record->queue_id);
}

static int add_record(const Reading *reading, const Record *record, int64_t row) {
    NewMessages *batch = reading->batch;
    Py_ssize_t topic_at = batch->text_size;
    byte *text = room_for_text(batch, 1 + record->topic_size + record->properties_size);
    if (text == NULL) return 0;
    *text = (byte)record->topic_size;
    put_bytes(put_bytes(text + 1, record->topic, record->topic_size), record->properties, record->properties_size);
    Message *message = add_message(batch, record->properties_size);
    if (message == NULL) return 0;
    message->topic_at = topic_at, message->topic_size = 1 + record->topic_size;
    message->row = row, message->queue_id = record->queue_id, message->sys_flag = record->sys_flag;
    message->physical_offset = record->physical_offset, message->size = record->size;
    message->queue_offset = record->queue_offset, message->store_timestamp = record->store_timestamp;
    message->begins_group = 1;
    batch->stored = batch->count;
    return 1;
}

/* Is this a record that needs no further look, and says itself that it lies here? */
static int is_usual(const Record *record, int64_t place, int check_crc) {
    if (get32(record->start + MAGIC_AT) != MAGIC_V1 || record->sys_flag & NOT_IN_A_QUEUE || record->topic_size > 127
        || get64(record->start + PHYSICAL_OFFSET_AT) != place)
        return 0;
    return !check_crc || (crc32_of(record->body, record->body_size) & CRC_MASK) == get32(record->start + BODY_CRC_AT);
}

/* Add records from `at` on; how many bytes they have, or -1 with an exception. */
static Py_ssize_t add_records(const Reading *reading, const byte *start, Py_ssize_t size, int64_t offset, int check_crc) {
    Py_ssize_t at = 0, ahead_at = 0;
    Record records[AHEAD];
    for (int count = AHEAD; count == AHEAD && reading->batch->count < MOST;) {
        for (count = 0; count < AHEAD; count++) {
            Record *record = &records[count];
            if (!read_record(start + ahead_at, size - ahead_at, record) || !is_usual(record, offset + ahead_at, check_crc)) break;
            record->physical_offset = offset + ahead_at;
            ahead_at += (Py_ssize_t)record->size;
            if (reading->by_topic == NULL) continue;
            record->topic_hash = hash_topic(reading->rows, record->topic, record->topic_size);
            fetch_topic(reading->rows, record->topic_hash);
        }
        for (int n = 0; n < count; n++) {
            int64_t row = reading->by_topic == NULL ? 0 : row_of(reading, &records[n]);
            if (row < 0 || !add_record(reading, &records[n], row)) return PyErr_Occurred() ? -1 : at;
            at += (Py_ssize_t)records[n].size;
        }
    }
    return at;
}

/* messages, memory, at, limit, start, check the CRC, queues, finds queues -> the first record that was not read */
PyObject *read_records(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, limit, start;
    Reading reading = {.batch = count == 8 ? as_messages(args[0]) : NULL};
    if (reading.batch == NULL || reading.batch->count > 0 || !as_number(args[2], 0, INT64_MAX, &at)
        || !as_number(args[3], at, INT64_MAX, &limit) || !as_number(args[4], 0, INT64_MAX / 2, &start)
        || !PyBool_Check(args[5]) || !PyBool_Check(args[7]))
        return wrong_arguments("read_records");
    Py_buffer bytes;
    if (PyObject_GetBuffer(args[1], &bytes, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *by_topic = PyObject_GetAttrString(args[6], "by_raw_topic");
    PyObject *rows = PyObject_GetAttrString(args[6], "rows_by_topic");
    PyObject *by_row = PyObject_GetAttrString(args[6], "by_row");
    Py_ssize_t read = -1;
    if (by_topic != NULL && rows != NULL && by_row != NULL) {
        if (!PyDict_CheckExact(by_topic) || !Py_IS_TYPE(rows, &topic_table_type) || !PyList_CheckExact(by_row)
            || limit > bytes.len)
            wrong_arguments("read_records");
        else {
            reading.by_topic = args[7] == Py_True ? by_topic : NULL;
            reading.rows = (TopicTable *)rows;
            if (reading.batch->by_row == NULL) reading.batch->by_row = Py_NewRef(by_row);
            read = add_records(&reading, (const byte *)bytes.buf + at, (Py_ssize_t)(limit - at), start + at, args[5] == Py_True);
        }
    }
    Py_XDECREF(by_topic);
    Py_XDECREF(rows);
    Py_XDECREF(by_row);
    PyBuffer_Release(&bytes);
    return read < 0 ? NULL : PyLong_FromLongLong(at + read);
}
