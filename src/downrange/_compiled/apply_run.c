/* From records to queue entries and key index: store/dispatcher.py, apply_run, and store/key_index.py, put_run. */
#include <stdatomic.h>
#include "queue_tails.h"
#include "run.h"

/* Java's String.hashCode, continued from `start`. */
static uint32_t hash_text(PyObject *text, uint32_t h) {
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t n = 0; n < PyUnicode_GET_LENGTH(text); n++) {
        Py_UCS4 c = PyUnicode_READ(kind, data, n);
        if (c > 0xFFFF) {
            h = 31 * h + (0xD800 + ((c - 0x10000) >> 10));
            c = 0xDC00 + ((c - 0x10000) & 0x3FF);
        }
        h = 31 * h + c;
    }
    return h;
}

/* The same for UTF-8; 0 when it is none. */
static int hash_bytes(const byte *at, Py_ssize_t size, uint32_t *hash) {
    uint32_t h = *hash;
    for (Py_ssize_t n = 0; n < size; n++) {
        if (at[n] >= 0x80) {
            PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
            if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
            if (text == NULL) return 0;
            *hash = hash_text(text, *hash);
            Py_DECREF(text);
            return 1;
        }
        h = 31 * h + at[n];
    }
    *hash = h;
    return 1;
}

/* Is this a place for the next entry of a queue, or the end of a block? */
static int is_place(int64_t at, Py_ssize_t memory) {
    return at == 0 || (at > BLOCK && at <= memory && (at - 1) % BLOCK + 1 >= FIRST && at % BLOCK % ENTRY_SIZE
                       == (at % BLOCK ? FIRST : 0));
}

/* A new block behind the one that ends at `at`: where its first entry goes. */
static int64_t take_block(const Py_buffer *memory, int64_t at) {
    byte *start = memory->buf;
    int64_t block = get_native(start + 8 * FREE_BLOCK), used = get_native(start + 8 * USED_BYTES);
    if (block >= BLOCK && block <= memory->len - BLOCK && block % BLOCK == 0) {
        put_native(start + 8 * FREE_BLOCK, get_native(start + block));
    } else {
        block = used;
        put_native(start + 8 * FREE_BLOCK, 0);
        put_native(start + 8 * USED_BYTES, used + BLOCK);
    }
    put_native(start + 8 * BLOCKS_IN_USE, get_native(start + 8 * BLOCKS_IN_USE) + 1);
    put_native(start + block, at ? at - BLOCK : 0);
    return block + FIRST;
}

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

typedef struct {
    uint32_t hash;
    int64_t physical_offset;
} Key;

typedef struct {
    Key *keys;
    Py_ssize_t count, room;
} Keys;

static int add_key(Keys *keys, const byte *at, Py_ssize_t size, uint32_t hash, int64_t physical_offset) {
    if (keys->count == keys->room) {
        Py_ssize_t room = 2 * keys->room + 64;
        Key *more = PyMem_Realloc(keys->keys, (size_t)room * sizeof(Key));
        if (more == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        keys->keys = more, keys->room = room;
    }
    if (!hash_bytes(at, size, &hash)) return 0;
    if (hash > 0x7FFFFFFF) hash = -hash & 0x7FFFFFFF;
    keys->keys[keys->count++] = (Key){hash, physical_offset};
    return 1;
}

/* The hash of the unique id, then those of the words of KEYS. */
static int add_keys(Keys *keys, const Message *message, const byte *properties) {
    uint32_t start = 0;
    if (!hash_bytes(message->topic + 1, message->topic_size - 1, &start)) return 0;
    start = 31 * start + '#';
    const byte *at = properties + message->unique_key.at;
    if (message->unique_key.size && !add_key(keys, at, message->unique_key.size, start, message->physical_offset)) return 0;
    at = properties + message->keys.at;
    for (const byte *end = at + message->keys.size; at < end;) {
        const byte *stop = memchr(at, ' ', (size_t)(end - at));
        if (stop == NULL) stop = end;
        if (stop > at && !add_key(keys, at, stop - at, start, message->physical_offset)) return 0;
        at = stop + 1;
    }
    return 1;
}

/* run, memory, slots, next entry, limit, used slots, seconds, end offset -> next entry, used slots, end offset */
PyObject *index_keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t slots, number, limit, used_slots, seconds, end_offset;
    Run *run = count == 8 ? as_run(args[0]) : NULL;
    if (run == NULL || !has_places(run) || !as_number(args[2], 1, INT32_MAX, &slots)
        || !as_number(args[3], 2, INT32_MAX, &number) || !as_number(args[4], number, INT32_MAX, &limit)
        || !as_number(args[5], 0, INT32_MAX, &used_slots) || !as_number(args[6], 0, INT32_MAX, &seconds)
        || !as_number(args[7], INT64_MIN, INT64_MAX, &end_offset))
        return refuse();
    PyObject *result = NULL;
    Keys keys = {NULL, 0, 0};
    Py_buffer memory = {0};
    for (Py_ssize_t n = 0; n < run->count; n++) {
        const Message *message = &run->messages[n];
        if (message->unique_key.size == 0 && message->keys.size == 0) continue;
        if (message->physical_offset < end_offset) goto end; /* indexed before, maybe */
        if (!add_keys(&keys, message, properties_of(run, message)) || keys.count > limit - number) goto end;
    }
    int64_t entries_at = 40 + 4 * slots;
    if (!take_buffer(args[1], &memory) || entries_at + 20 * limit > memory.len) goto end;
    for (Py_ssize_t n = 0; n < keys.count; n++) fetch((byte *)memory.buf + 40 + 4 * (keys.keys[n].hash % slots));
    for (Py_ssize_t n = 0; n < keys.count; n++, number++) {
        const Key *key = &keys.keys[n];
        byte *slot = (byte *)memory.buf + 40 + 4 * (key->hash % slots);
        byte *entry = (byte *)memory.buf + entries_at + 20 * number;
        int32_t before = (int32_t)get32(slot);
        if (before <= 0 || before > number) before = 0, used_slots++;
        entry = put64(put32(entry, key->hash), (uint64_t)key->physical_offset);
        put32(put32(entry, (uint32_t)seconds), (uint32_t)before);
        atomic_thread_fence(memory_order_release); /* a process that dies here leaves a slot that can be put right */
        put32(slot, (uint32_t)number);
        end_offset = key->physical_offset;
    }
    result = three_numbers(number, used_slots, end_offset);
end:
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    PyMem_Free(keys.keys);
    return result != NULL ? result : refuse();
}
