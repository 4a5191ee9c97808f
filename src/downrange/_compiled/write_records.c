/* From messages to records in a mapped file of the log: store/log/record_writer.py. */
#include <stdatomic.h>
#include "new_messages.h"
#include "queue_tails.h"

/* Give a message its place; 0 with an exception when a number of its row cannot be right. */
static int place_message(Message *message, int64_t *row, int64_t physical_offset) {
    if (row == NULL || row[NEXT] < 0 || row[NEXT] > INT64_MAX - INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "write_records: the queue of a message has no row, or a row without sense");
        return 0;
    }
    message->size = record_size(message);
    message->physical_offset = physical_offset;
    message->queue_offset = message->sys_flag & NOT_IN_A_QUEUE ? 0 : row[NEXT]++;
    return 1;
}

/* A record but for its size and magic number, which take the eight bytes before `at`; returns its end. */
static byte *put_record(byte *at, const NewMessages *batch, const Message *message, int64_t store_timestamp) {
    int64_t sys_flag = message->sys_flag & ~(int64_t)(BORN_HOST_V6 | STORE_HOST_V6);
    if (message->born_host_size == 20) sys_flag |= BORN_HOST_V6;
    if (message->store_host_size == 20) sys_flag |= STORE_HOST_V6;
    at = put32(at, crc32_of(message->body, message->body_size) & 0x7FFFFFFF);
    at = put32(at, (uint32_t)message->queue_id);
    at = put32(at, (uint32_t)message->flag);
    at = put64(at, (uint64_t)message->queue_offset);
    at = put64(at, (uint64_t)message->physical_offset);
    at = put32(at, (uint32_t)sys_flag);
    at = put64(at, (uint64_t)message->born_timestamp);
    at = put_bytes(at, message->born_host, message->born_host_size);
    at = put64(at, (uint64_t)store_timestamp);
    at = put_bytes(at, message->store_host, message->store_host_size);
    at = put32(at, (uint32_t)message->reconsume_times);
    at = put64(at, (uint64_t)message->prepared_offset);
    at = put32(at, (uint32_t)message->body_size);
    at = put_bytes(at, message->body, message->body_size);
    at = put_bytes(at, topic_of(batch, message), message->topic_size);
    at = put16(at, (uint32_t)message->properties_size);
    return put_bytes(at, properties_of(batch, message), message->properties_size);
}

static byte *put_head(byte *at, const Message *message) {
    return put32(put32(at, (uint32_t)message->size), MAGIC_V1);
}

/* Give places to messages from `first` on, as many whole groups as end before `limit`: the message behind them, and in
   `*end` where they end. NULL with an exception. */
static Message *place_groups(NewMessages *batch, Message *first, const Py_buffer *rows, int64_t start, int64_t limit, int64_t *end) {
    Message *last = batch->messages + batch->count, *group = first, *message = first;
    int64_t at = *end;
    for (; message < last; message++) {
        if (message->begins_group) group = message, *end = at;
        if (!place_message(message, row_at(rows, message->row), start + at)) break;
        at += message->size;
        if (at > limit || message->size > INT32_MAX) {
            message++;
            break;
        }
    }
    if (message == last && at <= limit && !PyErr_Occurred()) {
        *end = at;
        return last;
    }
    while (message-- > group) /* the group that did not fit gives its places back */
        if (message->size > 0 && !(message->sys_flag & NOT_IN_A_QUEUE) && row_at(rows, message->row) != NULL)
            row_at(rows, message->row)[NEXT]--, message->size = 0;
    if (!PyErr_Occurred()) return group;
    while (group-- > first)
        if (!(group->sys_flag & NOT_IN_A_QUEUE)) row_at(rows, group->row)[NEXT]--;
    return NULL;
}

/* messages, number, memory, at, limit, start, store timestamp, rows -> the first that was not written, end */
PyObject *write_records(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t store_timestamp, number, at, limit, start;
    NewMessages *batch = count == 8 ? as_messages(args[0]) : NULL;
    if (batch == NULL || !as_number(args[1], 0, batch->count - 1, &number) || number != batch->stored
        || !as_number(args[3], 0, INT64_MAX, &at) || !as_number(args[4], at, INT64_MAX, &limit)
        || !as_number(args[5], 0, INT64_MAX - INT32_MAX - limit, &start)
        || !as_number(args[6], INT64_MIN, INT64_MAX, &store_timestamp))
        return wrong_arguments("write_records");
    Py_buffer memory = {0}, rows = {0};
    PyObject *result = NULL;
    if (!take_buffer(args[7], &rows) || !take_buffer(args[2], &memory) || limit > memory.len) {
        wrong_arguments("write_records");
        goto end;
    }
    Message *first = batch->messages + number;
    for (const Message *message = first; message < batch->messages + batch->count; message++) {
        const int64_t *row = row_at(&rows, message->row);
        if (row != NULL) fetch(row);
    }
    int64_t end = at;
    Message *stop = place_groups(batch, first, &rows, start, limit, &end);
    if (stop == NULL) goto end;
    byte *to = (byte *)memory.buf + at;
    for (Message *message = first; message < stop; message++) {
        byte *rest = message > first ? put_head(to, message) : to + 8;
        to = put_record(rest, batch, message, store_timestamp);
    }
    if (stop > first) {
        /* The head of the first comes last: a process that dies here leaves nothing that could be read. */
        atomic_thread_fence(memory_order_release);
        put_head((byte *)memory.buf + at, first);
    }
    for (Message *message = first; message < stop; message++) message->store_timestamp = store_timestamp;
    batch->stored = stop - batch->messages;
    result = Py_BuildValue("(nL)", batch->stored, (long long)end);
end:
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    return result;
}
