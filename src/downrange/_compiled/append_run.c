/* Records into the mapped log: store/log/commit_log.py, append_run. */
#include <stdatomic.h>
#include "queue_tails.h"
#include "run.h"

#define MAGIC_V1 0xDAA320A7u
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32

/* Measure a record and number it. */
static int number_message(Message *message, int64_t *row, Py_ssize_t fixed) {
    if (message->properties_size > 0xFFFF) return 0;
    message->size = fixed + message->born_host_size + message->body_size + message->topic_size + message->properties_size;
    if (message->size > INT32_MAX || row[NEXT] < 0 || row[NEXT] > INT64_MAX - INT32_MAX) return 0;
    message->queue_offset = row[NEXT]++;
    return 1;
}

/* A record but for its size and magic number, which take the eight bytes before `at`; returns its end. */
static byte *put_record(byte *at, const Run *run, const Message *message, PyObject *store_host, int64_t store_timestamp) {
    int64_t sys_flag = message->sys_flag & ~(int64_t)(BORN_HOST_V6 | STORE_HOST_V6);
    if (message->born_host_size == 20) sys_flag |= BORN_HOST_V6;
    if (PyBytes_GET_SIZE(store_host) == 20) sys_flag |= STORE_HOST_V6;
    at = put32(at, crc32_of(message->body, message->body_size) & 0x7FFFFFFF);
    at = put32(at, (uint32_t)message->queue_id);
    at = put32(at, (uint32_t)message->flag);
    at = put64(at, (uint64_t)message->queue_offset);
    at = put64(at, (uint64_t)message->physical_offset);
    at = put32(at, (uint32_t)sys_flag);
    at = put64(at, (uint64_t)message->born_timestamp);
    at = put_bytes(at, message->born_host, message->born_host_size);
    at = put64(at, (uint64_t)store_timestamp);
    at = put_object(at, store_host);
    at = put32(at, (uint32_t)message->reconsume_times);
    at = put64(at, 0); /* prepared transaction offset */
    at = put32(at, (uint32_t)message->body_size);
    at = put_bytes(at, message->body, message->body_size);
    at = put_bytes(at, topic_of(run, message), message->topic_size);
    at = put16(at, (uint32_t)message->properties_size);
    return put_bytes(at, properties_of(run, message), message->properties_size);
}

static byte *put_head(byte *at, const Message *message) {
    return put32(put32(at, (uint32_t)message->size), MAGIC_V1);
}

static int is_host(PyObject *host) {
    return PyBytes_CheckExact(host) && (PyBytes_GET_SIZE(host) == 8 || PyBytes_GET_SIZE(host) == 20);
}

/* Where each message was born: all at one host, or those of each send at its own. */
static int take_born_hosts(Run *run, PyObject *hosts) {
    Message *message = run->messages, *end = message + run->count;
    int is_each = PyList_CheckExact(hosts);
    if (is_each && PyList_GET_SIZE(hosts) != run->requests) return 0;
    for (Py_ssize_t n = 0; n < (is_each ? run->requests : 1); n++) {
        PyObject *host = is_each ? PyList_GET_ITEM(hosts, n) : hosts;
        if (!is_host(host)) return 0;
        for (const Message *last = is_each ? message + run->sends[n].count : end; message < last; message++) {
            message->born_host = (const byte *)PyBytes_AS_STRING(host);
            message->born_host_size = PyBytes_GET_SIZE(host);
        }
    }
    return message == end;
}

/* run, born host or one for each send, store host, store timestamp, memory, at, limit, start, rows of the queues -> where the records end */
PyObject *append_run(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t store_timestamp, at, limit, start;
    Run *run = count == 9 ? as_run(args[0]) : NULL;
    if (run == NULL || run->count == 0 || has_places(run) || !take_born_hosts(run, args[1]) || !is_host(args[2])
        || !as_number(args[3], INT64_MIN, INT64_MAX, &store_timestamp) || !as_number(args[5], 0, INT64_MAX, &at)
        || !as_number(args[6], at, INT64_MAX, &limit)
        || !as_number(args[7], 0, INT64_MAX - INT32_MAX - limit, &start))
        return refuse();
    PyObject *store_host = args[2];
    Py_ssize_t fixed = 74 + PyBytes_GET_SIZE(store_host), numbered = 0;
    Message *messages = run->messages, *end = messages + run->count;
    Py_buffer memory = {0}, rows = {0};
    int is_done = 0;
    if (!take_buffer(args[8], &rows) || !take_buffer(args[4], &memory) || limit > memory.len) goto end;
    for (Message *message = messages; message < end; message++) {
        const int64_t *row = row_at(&rows, message->row);
        if (row == NULL) goto end;
        fetch(row);
    }

    /* First all that may fail, so that the memory stays as it is if something does. */
    int64_t wanted = at;
    for (Message *message = messages; message < end; message++) {
        if (!number_message(message, row_at(&rows, message->row), fixed)) goto end;
        numbered++;
        if (wanted > limit - message->size) goto end;
        message->physical_offset = start + wanted;
        wanted += message->size;
    }

    byte *to = (byte *)memory.buf + at;
    for (Message *message = messages; message < end; message++) {
        byte *rest = message > messages ? put_head(to, message) : to + 8;
        to = put_record(rest, run, message, store_host, store_timestamp);
    }
    /* The head of the first comes last: a process that dies here leaves nothing that could be read. */
    atomic_thread_fence(memory_order_release);
    put_head((byte *)memory.buf + at, messages);
    is_done = 1;

end:
    if (!is_done) {
        for (Py_ssize_t n = 0; n < numbered; n++) row_at(&rows, messages[n].row)[NEXT]--;
        for (Message *message = messages; message < end; message++) message->size = 0;
    }
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    return is_done ? PyLong_FromLongLong(start + wanted) : refuse();
}
