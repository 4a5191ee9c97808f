/* The numbers of many records, and where their parts lie: spark/record_arrays.py, read_heads.
 *
 * Records are far apart in memory, so most of the time would be spent waiting for it: what the next records need is asked
 * for some rows ahead.
 */
#include "records.h"

#define AHEAD 12
#define CACHE_LINE 64

/* The columns, as Python reads them: eight-byte numbers first, then four-byte numbers. Hosts are as they lie in the log. */
enum {
    QUEUE_OFFSET, PHYSICAL_OFFSET, BORN_TIME, STORE_TIME, BORN_HOST, STORE_HOST, BODY_START, BODY_STOP, PROPERTIES_START,
    PROPERTIES_STOP, LONGS,
};
enum { QUEUE_ID, SYS_FLAG, RECONSUME_TIMES, BODY_CRC, INTS };

/* Fetch the head and the end of a record into the cache; it is as long as another one, as far as is known. */
static inline void fetch(const byte *start, const byte *buffer_end, int64_t size) {
    __builtin_prefetch(start);
    __builtin_prefetch(start + CACHE_LINE);
    if (size <= buffer_end - start) {
        __builtin_prefetch(start + size - 1);
        __builtin_prefetch(start + size - 1 - CACHE_LINE);
    }
}

/* 0 when the record is unusual: damaged, or with an IPv6 host. */
static inline int take_head(const Py_buffer *buffer, int64_t start, Py_ssize_t row, Py_ssize_t rows, byte *columns,
                            int64_t *size) {
    if (start < 0 || start > buffer->len) return 0;
    const byte *base = buffer->buf, *at = base + start;
    Record record;
    if (!read_record(at, (Py_ssize_t)(buffer->len - start), &record) || record.born_extra || record.store_extra) return 0;
    int64_t *longs = (int64_t *)columns + row;
    int32_t *ints = (int32_t *)((int64_t *)columns + LONGS * rows) + row;
    longs[QUEUE_OFFSET * rows] = record.queue_offset;
    longs[PHYSICAL_OFFSET * rows] = get64(at + PHYSICAL_OFFSET_AT);
    longs[BORN_TIME * rows] = get64(at + BORN_TIMESTAMP_AT);
    longs[STORE_TIME * rows] = record.store_timestamp;
    memcpy(longs + BORN_HOST * rows, at + BORN_HOST_AT, sizeof(int64_t));
    memcpy(longs + STORE_HOST * rows, at + STORE_HOST_AT, sizeof(int64_t));
    longs[BODY_START * rows] = record.body - base;
    longs[BODY_STOP * rows] = record.body - base + record.body_size;
    longs[PROPERTIES_START * rows] = record.properties - base;
    longs[PROPERTIES_STOP * rows] = record.properties - base + record.properties_size;
    ints[QUEUE_ID * rows] = record.queue_id;
    ints[SYS_FLAG * rows] = (int32_t)record.sys_flag;
    ints[RECONSUME_TIMES * rows] = (int32_t)get32(at + RECONSUME_TIMES_AT);
    ints[BODY_CRC * rows] = (int32_t)get32(at + BODY_CRC_AT);
    *size = record.size;
    return 1;
}

/* read_heads(buffer, starts): the columns of the records that begin at starts, one behind the other in one block; None
   when one of them is unusual. */
PyObject *read_heads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_buffer buffer, given;
    PyObject *columns = NULL;
    if (count != 2 || PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return refuse();
    }
    if (PyObject_GetBuffer(args[1], &given, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        PyBuffer_Release(&buffer);
        return refuse();
    }
    Py_ssize_t rows = given.len / (Py_ssize_t)sizeof(int64_t);
    int is_aligned = rows == 0 || (uintptr_t)given.buf % sizeof(int64_t) == 0;
    if (given.len % (Py_ssize_t)sizeof(int64_t) == 0 && is_aligned && rows < INT32_MAX) {
        const int64_t *starts = given.buf;
        const byte *base = buffer.buf;
        int64_t size = FIXED_SIZE;
        Py_ssize_t row = 0;
        columns = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)(LONGS * sizeof(int64_t) + INTS * sizeof(int32_t)));
        for (; columns != NULL && row < rows; row++) {
            if (row + AHEAD < rows && starts[row + AHEAD] >= 0 && starts[row + AHEAD] < buffer.len)
                fetch(base + starts[row + AHEAD], base + buffer.len, size);
            if (!take_head(&buffer, starts[row], row, rows, (byte *)PyBytes_AS_STRING(columns), &size)) Py_CLEAR(columns);
        }
    }
    PyBuffer_Release(&given);
    PyBuffer_Release(&buffer);
    return columns != NULL ? columns : refuse();
}
