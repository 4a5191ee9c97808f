/* From stored messages to queue entries and the key index: store/dispatcher.py, put_entries, and
   store/index/key_index.py, index_keys. */
#include "dispatching.h"
#include "new_messages.h"

#define LEAST_GROWTH (256 * BLOCK)

/* Was the entry put before, by a replay that came this far? */
static int is_there(const Message *message, const int64_t *row) {
    return message->physical_offset + message->size <= row[PHYSICAL_END];
}

static void put_entry(const Message *message, int64_t *row, const Py_buffer *memory) {
    if (is_there(message, row)) return;
    int64_t at = row[AT];
    if (at % BLOCK == 0) at = take_block(memory, at);
    byte *to = put64((byte *)memory->buf + at, (uint64_t)message->physical_offset);
    put64(put32(to, (uint32_t)message->size), (uint64_t)message->code);
    row[AT] = at + ENTRY_SIZE;
    row[PHYSICAL_END] = message->physical_offset + message->size;
    row[MESSAGES] = (int64_t)((uint64_t)row[MESSAGES] + 1);
    row[BYTES] = (int64_t)((uint64_t)row[BYTES] + (uint64_t)message->size);
}

/* Does the entry come next in its queue, or is it there already? Then END and the next queue offset are moved on, so that
   the one after it can be asked about. */
static int comes_next(const Message *message, int64_t *row, Py_ssize_t memory) {
    if (is_there(message, row)) return 1;
    if (row[SPILL_AT] <= 0 || row[END] < 0 || row[END] % ENTRY_SIZE || row[END] / ENTRY_SIZE != message->queue_offset
        || row[END] > INT64_MAX - ENTRY_SIZE || (message->queue_offset == 0 && row[PHYSICAL_END] > 0)
        || !is_place(row[AT], memory))
        return 0;
    row[END] += ENTRY_SIZE;
    if (row[NEXT] < row[END] / ENTRY_SIZE) row[NEXT] = row[END] / ENTRY_SIZE;
    return 1;
}

/* What the queue entry holds for the tags; 0 when those are no UTF-8. */
static int find_code(const NewMessages *batch, Message *message) {
    uint32_t code = 0;
    if (message->has_code) return 1;
    if (!hash_bytes(properties_of(batch, message) + message->tags.at, message->tags.size, &code)) return 0;
    message->code = (int32_t)code;
    return 1;
}

/* Add the number of a row to those that are to be written, once. */
static int add_full(PyObject *full, int64_t row) {
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(full); n++)
        if (PyLong_AsLongLong(PyList_GET_ITEM(full, n)) == row) return 1;
    PyObject *number = PyLong_FromLongLong(row);
    int is_added = number != NULL && PyList_Append(full, number) == 0;
    Py_XDECREF(number);
    return is_added;
}

static int is_in_a_queue(const Message *message) { return !(message->sys_flag & NOT_IN_A_QUEUE); }

/* Make the memory of the queues larger if it has not so many free blocks; 0 when it is no such memory. */
static int has_blocks(PyObject *memory, Py_ssize_t blocks) {
    if (!PyByteArray_CheckExact(memory) || PyByteArray_GET_SIZE(memory) < BLOCK) return 0;
    Py_ssize_t size = PyByteArray_GET_SIZE(memory);
    int64_t used = get_native((const byte *)PyByteArray_AS_STRING(memory) + 8 * USED_BYTES);
    if (used < BLOCK || used > size) return 0;
    if (used <= size - blocks * BLOCK) return 1;
    Py_ssize_t growth = size / 8 > LEAST_GROWTH ? size / 8 / BLOCK * BLOCK : LEAST_GROWTH;
    Py_ssize_t larger = size + (growth > blocks * BLOCK ? growth : blocks * BLOCK);
    if (PyByteArray_Resize(memory, larger) < 0) return 0;
    memset(PyByteArray_AS_STRING(memory) + size, 0, (size_t)(larger - size));
    return 1;
}

/* messages, number, stop, rows, memory -> the first without an entry, the rows of the queues that have to be written */
PyObject *put_entries(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    NewMessages *batch = count == 5 ? as_messages(args[0]) : NULL;
    Py_ssize_t from, to, reached;
    Py_buffer rows = {0}, memory = {0};
    PyObject *full = NULL;
    if (batch == NULL || !as_stretch(batch, args[1], args[2], batch->stored, &from, &to))
        return wrong_arguments("put_entries");
    if (!has_blocks(args[4], to - from) || !take_buffer(args[3], &rows) || !take_buffer(args[4], &memory)) {
        wrong_arguments("put_entries");
        goto end;
    }
    full = PyList_New(0);
    Message *messages = batch->messages;
    for (Py_ssize_t n = from; n < to; n++) {
        const int64_t *row = row_at(&rows, messages[n].row);
        if (row != NULL && row[AT] > 0 && row[AT] < memory.len) fetch((byte *)memory.buf + row[AT]);
    }
    for (reached = from; reached < to; reached++) {
        Message *message = &messages[reached];
        int64_t *row = row_at(&rows, message->row);
        if (is_in_a_queue(message) && (row == NULL || !find_code(batch, message) || !comes_next(message, row, memory.len)))
            break;
    }
    for (Py_ssize_t n = from; n < reached; n++)
        if (is_in_a_queue(&messages[n])) put_entry(&messages[n], row_at(&rows, messages[n].row), &memory);
    for (Py_ssize_t n = from; full != NULL && n < reached; n++) {
        const int64_t *row = row_at(&rows, messages[n].row);
        if (is_in_a_queue(&messages[n]) && row[END] >= row[SPILL_AT] && !add_full(full, messages[n].row)) Py_CLEAR(full);
    }
end:
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    return full == NULL ? NULL : Py_BuildValue("(nN)", reached, full);
}

/* messages, number, stop, memory, slots, next entry, limit, used slots, end offset
   -> next entry, used slots, end offset, end timestamp; None, and nothing was put, when the keys do not fit this file or are unusual */
PyObject *index_keys(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Index index = {0};
    Py_ssize_t from, to;
    NewMessages *batch = count == 9 ? as_messages(args[0]) : NULL;
    if (batch == NULL || !as_stretch(batch, args[1], args[2], batch->stored, &from, &to)
        || !as_number(args[4], 1, INT32_MAX, &index.slots) || !as_number(args[5], 1, INT32_MAX, &index.next_entry)
        || !as_number(args[6], 0, INT32_MAX, &index.limit) || !as_number(args[7], 0, INT32_MAX, &index.used_slots)
        || !as_number(args[8], INT64_MIN, INT64_MAX, &index.end_offset))
        return wrong_arguments("index_keys");
    PyObject *result = NULL;
    Keys keys = {NULL, 0, 0};
    if (index.next_entry < 2) return refuse(); /* the first entry of a file says when the file begins */
    for (Py_ssize_t n = from; n < to; n++) {
        const Message *message = &batch->messages[n];
        const byte *properties = properties_of(batch, message);
        uint32_t start = 0;
        if (message->unique_key.size == 0 && message->keys.size == 0) continue;
        if ((message->sys_flag & TRANSACTION_MASK) == TRANSACTION_MASK) continue; /* rolled back */
        if (message->physical_offset < index.end_offset) continue;                /* indexed before */
        if (!hash_bytes(topic_of(batch, message) + 1, message->topic_size - 1, &start)) goto end;
        start = 31 * start + '#';
        if (!add_keys(&keys, properties + message->unique_key.at, message->unique_key.size,
                      properties + message->keys.at, message->keys.size, start, message->physical_offset,
                      message->store_timestamp)
            || keys.count > index.limit - index.next_entry)
            goto end;
    }
    if (!take_buffer(args[3], &index.memory) || !is_index(&index)) {
        wrong_arguments("index_keys");
        goto end;
    }
    if (keys.count > 0) {
        byte *header = index.memory.buf;
        index.begin_timestamp = get64(header);
        put_keys(&index, &keys);
        put64(header + 8, (uint64_t)index.end_timestamp);
        put64(header + 24, (uint64_t)index.end_offset);
        put32(put32(header + 32, (uint32_t)index.used_slots), (uint32_t)index.next_entry);
    }
    result = Py_BuildValue("(LLLL)", (long long)index.next_entry, (long long)index.used_slots,
                           (long long)index.end_offset, (long long)index.end_timestamp);
end:
    if (index.memory.obj != NULL) PyBuffer_Release(&index.memory);
    PyMem_Free(keys.keys);
    return result != NULL ? result : refuse();
}
