/* From records to queue entries and key index: store/dispatcher.py, apply_run, and store/key_index.py, put_run. */
#include <stdatomic.h>
#include "queue_tails.h"

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

enum { TAGS, UNIQUE_KEY, KEYS, LOOKED_UP };

/* The values of those properties; `at` is NULL for one that is missing or empty. */
static void find_properties(PyObject *properties, Text found[LOOKED_UP]) {
    static const char *const names[] = {"TAGS\x01", "UNIQ_KEY\x01", "KEYS\x01"};
    const byte *at = (const byte *)PyBytes_AS_STRING(properties), *end = at + PyBytes_GET_SIZE(properties);
    memset(found, 0, LOOKED_UP * sizeof *found);
    while (at < end) {
        const byte *stop = memchr(at, 2, (size_t)(end - at));
        if (stop == NULL) stop = end;
        for (int n = 0; n < LOOKED_UP; n++) {
            Py_ssize_t size = (Py_ssize_t)strlen(names[n]);
            if (stop - at < size || memcmp(at, names[n], (size_t)size)) continue;
            found[n].size = stop - at - size; /* the last one of a name counts */
            found[n].at = found[n].size ? at + size : NULL;
        }
        at = stop + 1;
    }
}

/* A message and its place; 0 when they are not that. */
static int take_place(PyObject *message, PyObject *places, Py_ssize_t n, int64_t place[3]) {
    if (!is_message(message) || n >= PyList_GET_SIZE(places)) return 0;
    PyObject *tuple = PyList_GET_ITEM(places, n);
    return PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 3
        && as_number(PyTuple_GET_ITEM(tuple, 0), 0, INT64_MAX - INT32_MAX, &place[0])
        && as_number(PyTuple_GET_ITEM(tuple, 1), 1, INT32_MAX, &place[1])
        && as_number(PyTuple_GET_ITEM(tuple, 2), 0, INT64_MAX - INT32_MAX, &place[2]);
}

typedef struct {
    int64_t *row;
    int64_t physical_offset, size, code;
} Entry;

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

static void put_entry(const Entry *entry, const Py_buffer *memory) {
    int64_t at = entry->row[AT];
    if (at % BLOCK == 0) at = take_block(memory, at);
    byte *to = put64((byte *)memory->buf + at, (uint64_t)entry->physical_offset);
    put64(put32(to, (uint32_t)entry->size), (uint64_t)entry->code);
    entry->row[AT] = at + ENTRY_SIZE;
    entry->row[PHYSICAL_END] = entry->physical_offset + entry->size;
    entry->row[MESSAGES] = (int64_t)((uint64_t)entry->row[MESSAGES] + 1);
    entry->row[BYTES] = (int64_t)((uint64_t)entry->row[BYTES] + (uint64_t)entry->size);
}

/* Does the entry come next in its queue? Then its END is moved on, so that the one after it can be asked about. */
static int comes_next(const Entry *entry, int64_t queue_offset, Py_ssize_t memory) {
    int64_t *row = entry->row;
    if (row[SPILL_AT] <= 0 || row[END] < 0 || row[END] % ENTRY_SIZE || row[END] / ENTRY_SIZE != queue_offset
        || row[END] > INT64_MAX - ENTRY_SIZE || entry->physical_offset + entry->size <= row[PHYSICAL_END]
        || !is_place(row[AT], memory))
        return 0;
    row[END] += ENTRY_SIZE;
    return 1;
}

/* messages, places, rows, memory -> the states of the queues that have to be written now */
PyObject *put_entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) return refuse();
    Py_ssize_t length = PyList_GET_SIZE(args[0]), numbered = 0;
    if (length < 1 || length != PyList_GET_SIZE(args[1])) return refuse();
    PyObject *run = PyList_AsTuple(args[0]), *full = PyList_New(0);
    Entry *entries = PyMem_Calloc((size_t)length, sizeof(Entry));
    Py_buffer rows = {0}, memory = {0};
    int64_t physical_end = 0, used;
    int is_done = 0;
    if (entries == NULL) PyErr_NoMemory();
    if (run == NULL || full == NULL || entries == NULL || !take_rows(args[2], &rows)) goto end;
    if (PyObject_GetBuffer(args[3], &memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        goto end;
    }
    if (memory.len < BLOCK || length > memory.len / BLOCK) goto end;
    used = get_native((byte *)memory.buf + 8 * USED_BYTES);
    if (used < BLOCK || used % BLOCK || used > memory.len - length * BLOCK) goto end; /* let the twin make it larger */

    for (Py_ssize_t n = 0; n < length; n++) {
        PyObject *message = PyTuple_GET_ITEM(run, n);
        if (!is_message(message)) goto end;
        PyObject *number = attribute(PyTuple_GET_ITEM(message, 0), s_row);
        entries[n].row = row_at(&rows, number);
        Py_XDECREF(number);
        if (entries[n].row == NULL) goto end;
        int64_t at = entries[n].row[AT];
        if (at > 0 && at < memory.len) fetch((byte *)memory.buf + at);
    }
    for (Py_ssize_t n = 0; n < length; n++, numbered++) {
        PyObject *message = PyTuple_GET_ITEM(run, n);
        Entry *entry = &entries[n];
        Text found[LOOKED_UP];
        int64_t place[3];
        uint32_t code = 0;
        if (!take_place(message, args[1], n, place) || place[0] < physical_end) goto end;
        physical_end = place[0] + place[1];
        find_properties(PyTuple_GET_ITEM(message, 2), found);
        if (!hash_bytes(found[TAGS].at, found[TAGS].size, &code)) goto end;
        entry->physical_offset = place[0], entry->size = place[1], entry->code = (int32_t)code;
        if (!comes_next(entry, place[2], memory.len)) goto end;
    }
    is_done = 1;
    for (Py_ssize_t n = 0; n < length; n++) put_entry(&entries[n], &memory);
    for (Py_ssize_t n = 0; full != NULL && n < length; n++) {
        PyObject *state = PyTuple_GET_ITEM(PyTuple_GET_ITEM(run, n), 0);
        if (entries[n].row[END] < entries[n].row[SPILL_AT]) continue;
        Py_ssize_t known = PyList_GET_SIZE(full);
        while (known > 0 && PyList_GET_ITEM(full, known - 1) != state) known--;
        if (known == 0 && PyList_Append(full, state) < 0) Py_CLEAR(full);
    }
end:
    for (Py_ssize_t n = 0; !is_done && n < numbered; n++) entries[n].row[END] -= ENTRY_SIZE;
    if (memory.obj != NULL) PyBuffer_Release(&memory);
    if (rows.obj != NULL) PyBuffer_Release(&rows);
    PyMem_Free(entries);
    Py_XDECREF(run);
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
        Py_ssize_t room = keys->room ? 2 * keys->room : 64;
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
static int add_keys(Keys *keys, const Text found[LOOKED_UP], uint32_t start, int64_t physical_offset) {
    const Text *unique = &found[UNIQUE_KEY];
    if (unique->at != NULL && !add_key(keys, unique->at, unique->size, start, physical_offset)) return 0;
    const byte *at = found[KEYS].at, *end = at + found[KEYS].size;
    while (at < end) {
        const byte *stop = memchr(at, ' ', (size_t)(end - at));
        if (stop == NULL) stop = end;
        if (stop > at && !add_key(keys, at, stop - at, start, physical_offset)) return 0;
        at = stop + 1;
    }
    return 1;
}

/* messages, places, memory, slots, next entry, limit, used slots, seconds, end offset
   -> next entry, used slots, end offset */
PyObject *index_keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t slots, number, limit, used_slots, seconds, end_offset;
    if (count != 9 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])
        || !as_number(args[3], 1, INT32_MAX, &slots) || !as_number(args[4], 2, INT32_MAX, &number)
        || !as_number(args[5], number, INT32_MAX, &limit) || !as_number(args[6], 0, INT32_MAX, &used_slots)
        || !as_number(args[7], 0, INT32_MAX, &seconds) || !as_number(args[8], INT64_MIN, INT64_MAX, &end_offset))
        return refuse();
    PyObject *run = PyList_AsTuple(args[0]), *state_before = NULL, *result = NULL;
    if (run == NULL) return NULL;
    Keys keys = {NULL, 0, 0};
    uint32_t start = 0;
    Py_buffer memory = {0};
    Py_ssize_t length = PyTuple_GET_SIZE(run);
    if (length != PyList_GET_SIZE(args[1])) goto end;
    for (Py_ssize_t n = 0; n < length; n++) {
        PyObject *message = PyTuple_GET_ITEM(run, n);
        Text found[LOOKED_UP];
        int64_t place[3];
        if (!take_place(message, args[1], n, place)) goto end;
        find_properties(PyTuple_GET_ITEM(message, 2), found);
        if (found[UNIQUE_KEY].at == NULL && found[KEYS].at == NULL) continue;
        if (place[0] < end_offset) goto end; /* indexed before, maybe */
        PyObject *state = PyTuple_GET_ITEM(message, 0);
        if (state != state_before) {
            PyObject *topic = attribute(state, s_topic);
            int is_topic = topic != NULL && PyUnicode_CheckExact(topic);
            if (is_topic) start = 31 * hash_text(topic, 0) + '#';
            Py_XDECREF(topic);
            if (!is_topic) goto end;
            state_before = state;
        }
        if (!add_keys(&keys, found, start, place[0])) goto end;
        if (keys.count > limit - number) goto end;
    }
    if (PyObject_GetBuffer(args[2], &memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        goto end;
    }
    int64_t entries_at = 40 + 4 * slots;
    if (entries_at + 20 * limit > memory.len) goto end;
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
    Py_DECREF(run);
    return result != NULL ? result : refuse();
}
