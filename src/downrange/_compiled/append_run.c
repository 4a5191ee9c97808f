/* Records into the mapped log: store/commit_log.py, append_run. */
#include <stdatomic.h>
#include "queue_tails.h"

#define MAGIC_V1 0xDAA320A7u
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32

typedef struct {
    PyObject *state, *body, *properties; /* borrowed from the run */
    PyObject *topic, *row_number;        /* owned */
    int64_t *row;                        /* of its queue, once it is numbered */
    int64_t queue_id, flag, sys_flag, born_timestamp, reconsume_times, queue_offset, size;
} Record;

/* What a message says of its record. */
static int take_message(Record *record, PyObject *message) {
    record->body = PyTuple_GET_ITEM(message, 1);
    record->properties = PyTuple_GET_ITEM(message, 2);
    return as_number(PyTuple_GET_ITEM(message, 4), INT64_MIN, INT64_MAX, &record->born_timestamp)
        && as_int32(PyTuple_GET_ITEM(message, 5), &record->flag)
        && as_int32(PyTuple_GET_ITEM(message, 6), &record->sys_flag)
        && as_int32(PyTuple_GET_ITEM(message, 7), &record->reconsume_times);
}

/* What its queue says of it. */
static int take_queue(Record *record) {
    PyObject *queue_id = attribute(record->state, s_queue_id);
    int is_number = as_int32(queue_id, &record->queue_id);
    Py_XDECREF(queue_id);
    record->topic = attribute(record->state, s_topic_field);
    record->row_number = attribute(record->state, s_row);
    if (!is_number || record->topic == NULL || record->row_number == NULL) return 0;
    fetch(record->topic);
    fetch(record->row_number);
    return 1;
}

/* Measure a record and number it. */
static int number_record(Record *record, int64_t *row, Py_ssize_t fixed) {
    if (row == NULL || !PyBytes_CheckExact(record->topic) || PyBytes_GET_SIZE(record->properties) > 0xFFFF) return 0;
    record->size = fixed + PyBytes_GET_SIZE(record->body) + PyBytes_GET_SIZE(record->topic)
        + PyBytes_GET_SIZE(record->properties);
    if (record->size > INT32_MAX || row[NEXT] < 0 || row[NEXT] == INT64_MAX) return 0;
    record->row = row;
    record->queue_offset = row[NEXT]++;
    return 1;
}

/* A record but for its size and magic number, which take the eight bytes before `at`; returns its end. */
static byte *put_record(byte *at, const Record *record, int64_t physical_offset, PyObject *born_host,
                        PyObject *store_host, int64_t store_timestamp) {
    const byte *body = (const byte *)PyBytes_AS_STRING(record->body);
    Py_ssize_t body_size = PyBytes_GET_SIZE(record->body);
    int64_t sys_flag = record->sys_flag & ~(int64_t)(BORN_HOST_V6 | STORE_HOST_V6);
    if (PyBytes_GET_SIZE(born_host) == 20) sys_flag |= BORN_HOST_V6;
    if (PyBytes_GET_SIZE(store_host) == 20) sys_flag |= STORE_HOST_V6;
    at = put32(at, crc32_of(body, body_size) & 0x7FFFFFFF);
    at = put32(at, (uint32_t)record->queue_id);
    at = put32(at, (uint32_t)record->flag);
    at = put64(at, (uint64_t)record->queue_offset);
    at = put64(at, (uint64_t)physical_offset);
    at = put32(at, (uint32_t)sys_flag);
    at = put64(at, (uint64_t)record->born_timestamp);
    at = put_object(at, born_host);
    at = put64(at, (uint64_t)store_timestamp);
    at = put_object(at, store_host);
    at = put32(at, (uint32_t)record->reconsume_times);
    at = put64(at, 0); /* prepared transaction offset */
    at = put32(at, (uint32_t)body_size);
    at = put_object(at, record->body);
    at = put_object(at, record->topic);
    at = put16(at, (uint32_t)PyBytes_GET_SIZE(record->properties));
    return put_object(at, record->properties);
}

static byte *put_head(byte *at, const Record *record) {
    return put32(put32(at, (uint32_t)record->size), MAGIC_V1);
}

static int is_host(PyObject *host) {
    return PyBytes_CheckExact(host) && (PyBytes_GET_SIZE(host) == 8 || PyBytes_GET_SIZE(host) == 20);
}

/* messages, born host, store host, store timestamp, memory, at, limit, start, rows of the queues -> places */
PyObject *append_run(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t store_timestamp, at, limit, start;
    if (count != 9 || !PyList_CheckExact(args[0]) || !is_host(args[1]) || !is_host(args[2])
        || !as_number(args[3], INT64_MIN, INT64_MAX, &store_timestamp) || !as_number(args[5], 0, INT64_MAX, &at)
        || !as_number(args[6], at, INT64_MAX, &limit) || !as_number(args[7], 0, INT64_MAX - limit, &start))
        return refuse();
    PyObject *born_host = args[1], *store_host = args[2];
    Py_ssize_t fixed = 74 + PyBytes_GET_SIZE(born_host) + PyBytes_GET_SIZE(store_host);
    PyObject *run = PyList_AsTuple(args[0]); /* whatever happens to the list, these stay */
    if (run == NULL) return NULL;
    Py_ssize_t length = PyTuple_GET_SIZE(run);
    Record *records = length > 0 ? PyMem_Calloc((size_t)length, sizeof(Record)) : NULL;
    PyObject *places = length > 0 ? PyList_New(length) : NULL;
    Py_buffer memory = {0}, rows = {0};
    int is_done = 0;
    if (length > 0 && records == NULL) PyErr_NoMemory();
    if (records == NULL || places == NULL || !take_rows(args[8], &rows)) goto end;
    for (Py_ssize_t n = 0; n < length; n++) {
        PyObject *message = PyTuple_GET_ITEM(run, n);
        if (!is_message(message)) goto end;
        records[n].state = PyTuple_GET_ITEM(message, 0);
        fetch_object(records[n].state);
    }
    for (Py_ssize_t n = 0; n < length; n++)
        if (!take_message(&records[n], PyTuple_GET_ITEM(run, n)) || !take_queue(&records[n])) goto end;
    for (Py_ssize_t n = 0; n < length; n++) {
        const int64_t *row = row_at(&rows, records[n].row_number);
        if (row == NULL) goto end;
        fetch(row);
    }

    /* First all that may fail, so that the memory stays as it is if something does. */
    int64_t wanted = at;
    for (Py_ssize_t n = 0; n < length; n++) {
        Record *record = &records[n];
        if (!number_record(record, row_at(&rows, record->row_number), fixed)) goto end;
        int is_within = wanted <= limit - record->size;
        PyObject *place = is_within ? three_numbers(start + wanted, record->size, record->queue_offset) : NULL;
        if (place == NULL) goto end;
        PyList_SET_ITEM(places, n, place);
        wanted += record->size;
    }
    if (PyObject_GetBuffer(args[4], &memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        goto end;
    }
    if (limit > memory.len) goto end;

    byte *to = (byte *)memory.buf + at;
    for (Py_ssize_t n = 0; n < length; n++) {
        byte *body = n > 0 ? put_head(to, &records[n]) : to + 8;
        to = put_record(body, &records[n], start + (to - (byte *)memory.buf), born_host, store_host, store_timestamp);
    }
    /* The head of the first comes last: a process that dies here leaves nothing that could be read. */
    atomic_thread_fence(memory_order_release);
    put_head((byte *)memory.buf + at, &records[0]);
    is_done = 1;

end:
    for (Py_ssize_t n = 0; records != NULL && n < length; n++) {
        if (!is_done && records[n].row != NULL) records[n].row[NEXT]--;
        Py_XDECREF(records[n].row_number);
        Py_XDECREF(records[n].topic);
    }
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    PyMem_Free(records);
    Py_DECREF(run);
    if (is_done) return places;
    Py_XDECREF(places);
    return refuse();
}
