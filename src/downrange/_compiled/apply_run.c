/* From records to queue entries and key index: store/dispatcher.py, apply_run, and store/index/key_index.py, put_run. */
#include "dispatching.h"
#include "run.h"

static void put_entry(const Message *message, int64_t *row, const Py_buffer *memory, uint32_t code) {
    int64_t at = row[AT];
    if (at % BLOCK == 0) at = take_block(memory, at);
    byte *to = put64((byte *)memory->buf + at, (uint64_t)message->physical_offset);
    put64(put32(to, (uint32_t)message->size), (uint64_t)(int64_t)(int32_t)code);
    row[AT] = at + ENTRY_SIZE;
    row[PHYSICAL_END] = message->physical_offset + message->size;
    row[MESSAGES] = (int64_t)((uint64_t)row[MESSAGES] + 1);
    row[BYTES] = (int64_t)((uint64_t)row[BYTES] + (uint64_t)message->size);
}

/* Does the entry come next in its queue? Then its END is moved on, so that the one after it can be asked about. */
static int comes_next(const Message *message, int64_t *row, Py_ssize_t memory) {
    if (row[SPILL_AT] <= 0 || row[END] < 0 || row[END] % ENTRY_SIZE || row[END] / ENTRY_SIZE != message->queue_offset
        || row[END] > INT64_MAX - ENTRY_SIZE || message->physical_offset + message->size <= row[PHYSICAL_END]
        || !is_place(row[AT], memory))
        return 0;
    row[END] += ENTRY_SIZE;
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

/* run, rows, memory -> the rows of the queues that have to be written now */
PyObject *put_entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Run *run = count == 3 ? as_run(args[0]) : NULL;
    if (run == NULL || !has_places(run)) return refuse();
    Py_ssize_t length = run->count, numbered = 0;
    PyObject *full = PyList_New(0);
    uint32_t *codes = PyMem_Calloc((size_t)length, sizeof *codes);
    Py_buffer rows = {0}, memory = {0};
    int64_t physical_end = 0, used;
    int is_done = 0;
    if (codes == NULL) PyErr_NoMemory();
    if (full == NULL || codes == NULL || !take_buffer(args[1], &rows) || !take_buffer(args[2], &memory)) goto end;
    if (memory.len < BLOCK || length > memory.len / BLOCK) goto end;
    used = get_native((byte *)memory.buf + 8 * USED_BYTES);
    if (used < BLOCK || used % BLOCK || used > memory.len - length * BLOCK) goto end; /* let the twin make it larger */

    for (Py_ssize_t n = 0; n < length; n++) {
        const int64_t *row = row_at(&rows, run->messages[n].row);
        if (row == NULL) goto end;
        if (row[AT] > 0 && row[AT] < memory.len) fetch((byte *)memory.buf + row[AT]);
    }
    for (Py_ssize_t n = 0; n < length; n++, numbered++) {
        const Message *message = &run->messages[n];
        if (message->physical_offset < physical_end) goto end;
        physical_end = message->physical_offset + message->size;
        if (!hash_bytes(properties_of(run, message) + message->tags.at, message->tags.size, &codes[n])) goto end;
        if (!comes_next(message, row_at(&rows, message->row), memory.len)) goto end;
    }
    is_done = 1;
    for (Py_ssize_t n = 0; n < length; n++)
        put_entry(&run->messages[n], row_at(&rows, run->messages[n].row), &memory, codes[n]);
    for (Py_ssize_t n = 0; full != NULL && n < length; n++) {
        const int64_t *row = row_at(&rows, run->messages[n].row);
        if (row[END] >= row[SPILL_AT] && !add_full(full, run->messages[n].row)) Py_CLEAR(full);
    }
end:
    for (Py_ssize_t n = 0; !is_done && n < numbered; n++) row_at(&rows, run->messages[n].row)[END] -= ENTRY_SIZE;
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    PyMem_Free(codes);
    if (is_done) return full;
    Py_XDECREF(full);
    return refuse();
}

/* run, memory, slots, next entry, limit, used slots, seconds, end offset -> next entry, used slots, end offset */
PyObject *index_keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t seconds;
    Index index = {0};
    Run *run = count == 8 ? as_run(args[0]) : NULL;
    if (run == NULL || !has_places(run) || !as_number(args[2], 1, INT32_MAX, &index.slots)
        || !as_number(args[3], 2, INT32_MAX, &index.next_entry)
        || !as_number(args[4], index.next_entry, INT32_MAX, &index.limit)
        || !as_number(args[5], 0, INT32_MAX, &index.used_slots) || !as_number(args[6], 0, INT32_MAX, &seconds)
        || !as_number(args[7], INT64_MIN, INT64_MAX, &index.end_offset))
        return refuse();
    PyObject *result = NULL;
    Keys keys = {NULL, 0, 0};
    for (Py_ssize_t n = 0; n < run->count; n++) {
        const Message *message = &run->messages[n];
        const byte *properties = properties_of(run, message);
        uint32_t start = 0;
        if (message->unique_key.size == 0 && message->keys.size == 0) continue;
        if (message->physical_offset < index.end_offset) goto end; /* indexed before, maybe */
        if (!hash_bytes(topic_of(run, message) + 1, message->topic_size - 1, &start)) goto end;
        start = 31 * start + '#';
        if (!add_keys(&keys, properties + message->unique_key.at, message->unique_key.size,
                      properties + message->keys.at, message->keys.size, start, message->physical_offset)
            || keys.count > index.limit - index.next_entry)
            goto end;
    }
    if (!take_buffer(args[1], &index.memory) || !is_index(&index)) goto end;
    put_keys(&index, &keys, seconds);
    result = three_numbers(index.next_entry, index.used_slots, index.end_offset);
end:
    if (index.memory.obj != NULL) PyBuffer_Release(&index.memory);
    PyMem_Free(keys.keys);
    return result != NULL ? result : refuse();
}
