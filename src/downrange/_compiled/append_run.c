/* Records into the mapped log: store/commit_log.py, append_run. */
#include <stdatomic.h>
#include "runs.h"

/* CRC-32 as zlib computes it, eight bytes at a time. */
static uint32_t crc_table[8][256];

void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ 0xEDB88320u : c >> 1;
        crc_table[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int n = 0; n < 256; n++) {
            uint32_t c = crc_table[k - 1][n];
            crc_table[k][n] = crc_table[0][c & 0xFF] ^ c >> 8;
        }
}

static uint32_t crc32_of(const byte *at, Py_ssize_t size) {
    uint32_t c = 0xFFFFFFFFu;
    for (; size >= 8; size -= 8, at += 8) {
        c ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        c = crc_table[7][c & 0xFF] ^ crc_table[6][c >> 8 & 0xFF] ^ crc_table[5][c >> 16 & 0xFF] ^ crc_table[4][c >> 24]
            ^ crc_table[3][at[4]] ^ crc_table[2][at[5]] ^ crc_table[1][at[6]] ^ crc_table[0][at[7]];
    }
    while (size-- > 0) c = crc_table[0][(c ^ *at++) & 0xFF] ^ c >> 8;
    return c ^ 0xFFFFFFFFu;
}

#define MAGIC_V1 0xDAA320A7u
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32

typedef struct {
    PyObject *state, *body, *properties; /* borrowed from the run */
    PyObject *topic, *offset_before;     /* owned */
    int64_t queue_id, flag, sys_flag, born_timestamp, reconsume_times, queue_offset, size;
} Record;

/* Number a record and measure it. The state's next offset is moved on as the last thing. */
static int take_record(Record *record, PyObject *message, Py_ssize_t fixed) {
    if (!is_message(message)) return 0;
    PyObject *state = record->state = PyTuple_GET_ITEM(message, 0);
    record->body = PyTuple_GET_ITEM(message, 1);
    record->properties = PyTuple_GET_ITEM(message, 2);
    if (!as_number(PyTuple_GET_ITEM(message, 4), INT64_MIN, INT64_MAX, &record->born_timestamp)) return 0;
    if (!as_int32(PyTuple_GET_ITEM(message, 5), &record->flag)) return 0;
    if (!as_int32(PyTuple_GET_ITEM(message, 6), &record->sys_flag)) return 0;
    if (!as_int32(PyTuple_GET_ITEM(message, 7), &record->reconsume_times)) return 0;
    PyObject *queue_id = attribute(state, s_queue_id);
    int is_number = as_int32(queue_id, &record->queue_id);
    Py_XDECREF(queue_id);
    if (!is_number || PyBytes_GET_SIZE(record->properties) > 0xFFFF) return 0;
    record->topic = attribute(state, s_topic_field);
    if (record->topic == NULL || !PyBytes_CheckExact(record->topic)) return 0;
    record->size = fixed + PyBytes_GET_SIZE(record->body) + PyBytes_GET_SIZE(record->topic)
        + PyBytes_GET_SIZE(record->properties);
    if (record->size > INT32_MAX) return 0;
    record->offset_before = attribute(state, s_next_offset);
    if (!as_number(record->offset_before, 0, INT64_MAX - 1, &record->queue_offset)) {
        Py_CLEAR(record->offset_before);
        return 0;
    }
    PyObject *next = PyLong_FromLongLong(record->queue_offset + 1);
    if (next == NULL || PyObject_SetAttr(state, s_next_offset, next) < 0) Py_CLEAR(record->offset_before);
    Py_XDECREF(next);
    return record->offset_before != NULL;
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

/* messages, born host, store host, store timestamp, memory, at, limit, start -> places */
PyObject *append_run(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t store_timestamp, at, limit, start;
    if (count != 8 || !PyList_CheckExact(args[0]) || !is_host(args[1]) || !is_host(args[2])
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
    Py_buffer memory = {0};
    int is_done = 0;
    if (length > 0 && records == NULL) PyErr_NoMemory();
    if (records == NULL || places == NULL) goto end;

    /* First all that may fail, so that the memory stays as it is if something does. */
    int64_t wanted = at;
    for (Py_ssize_t n = 0; n < length; n++) {
        Record *record = &records[n];
        if (!take_record(record, PyTuple_GET_ITEM(run, n), fixed)) goto end;
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
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    for (Py_ssize_t n = length - 1; records != NULL && n >= 0; n--) {
        Record *record = &records[n];
        if (!is_done && record->offset_before != NULL) {
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            if (PyObject_SetAttr(record->state, s_next_offset, record->offset_before) < 0) PyErr_Clear();
            PyErr_Restore(type, value, traceback);
        }
        Py_XDECREF(record->offset_before);
        Py_XDECREF(record->topic);
    }
    PyMem_Free(records);
    Py_DECREF(run);
    if (is_done) return places;
    Py_XDECREF(places);
    return refuse();
}
