/* What a record leaves in its queue and in the key index: hashes of tag and keys, a queue entry, index entries. */
#ifndef DOWNRANGE_DISPATCHING_H
#define DOWNRANGE_DISPATCHING_H

#include <stdatomic.h>
#include "queue_tails.h"

static inline uint64_t get64(const byte *at) { return (uint64_t)get32(at) << 32 | get32(at + 4); }

/* Java's String.hashCode, continued from `h`. */
static inline uint32_t hash_text(PyObject *text, uint32_t h) {
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
static inline int hash_bytes(const byte *at, Py_ssize_t size, uint32_t *hash) {
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
static inline void find_properties(const byte *at, Py_ssize_t size, Text found[LOOKED_UP]) {
    static const struct {
        const char *name;
        Py_ssize_t size;
    } names[] = {{"TAGS\x01", 5}, {"UNIQ_KEY\x01", 9}, {"KEYS\x01", 5}};
    const byte *end = at + size;
    memset(found, 0, LOOKED_UP * sizeof *found);
    while (at < end) {
        const byte *stop = memchr(at, 2, (size_t)(end - at));
        if (stop == NULL) stop = end;
        for (int n = 0; n < LOOKED_UP; n++) {
            Py_ssize_t length = names[n].size;
            if (stop - at < length || memcmp(at, names[n].name, (size_t)length)) continue;
            found[n].size = stop - at - length; /* the last one of a name counts */
            found[n].at = found[n].size ? at + length : NULL;
        }
        at = stop + 1;
    }
}

/* Is this a place for the next entry of a queue, or the end of a block? */
static inline int is_place(int64_t at, Py_ssize_t memory) {
    return at == 0 || (at > BLOCK && at <= memory && (at - 1) % BLOCK + 1 >= FIRST && at % BLOCK % ENTRY_SIZE
                       == (at % BLOCK ? FIRST : 0));
}

/* A new block behind the one that ends at `at`: where its first entry goes; 0 when there is no room for one. */
static inline int64_t take_block(const Py_buffer *memory, int64_t at) {
    byte *start = memory->buf;
    int64_t block = get_native(start + 8 * FREE_BLOCK), used = get_native(start + 8 * USED_BYTES);
    if (block >= BLOCK && block <= memory->len - BLOCK && block % BLOCK == 0) {
        put_native(start + 8 * FREE_BLOCK, get_native(start + block));
    } else {
        if (used < BLOCK || used % BLOCK || used > memory->len - BLOCK) return 0;
        block = used;
        put_native(start + 8 * FREE_BLOCK, 0);
        put_native(start + 8 * USED_BYTES, used + BLOCK);
    }
    put_native(start + 8 * BLOCKS_IN_USE, get_native(start + 8 * BLOCKS_IN_USE) + 1);
    put_native(start + block, at ? at - BLOCK : 0);
    return block + FIRST;
}

/* Hashes of keys, as the index has them. */
typedef struct {
    uint32_t *hashes;
    Py_ssize_t count, room;
} Keys;

static inline int add_key(Keys *keys, const byte *at, Py_ssize_t size, uint32_t hash) {
    if (keys->count == keys->room) {
        Py_ssize_t room = keys->room ? 2 * keys->room : 64;
        uint32_t *more = PyMem_Realloc(keys->hashes, (size_t)room * sizeof *more);
        if (more == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        keys->hashes = more, keys->room = room;
    }
    if (!hash_bytes(at, size, &hash)) return 0;
    if (hash > 0x7FFFFFFF) hash = -hash & 0x7FFFFFFF;
    keys->hashes[keys->count++] = hash;
    return 1;
}

/* The hash of the unique id, then those of the words of KEYS; `start` is that of the topic and a '#'. */
static inline int add_keys(Keys *keys, const Text found[LOOKED_UP], uint32_t start) {
    const Text *unique = &found[UNIQUE_KEY];
    if (unique->at != NULL && !add_key(keys, unique->at, unique->size, start)) return 0;
    const byte *at = found[KEYS].at, *end = at + found[KEYS].size;
    while (at < end) {
        const byte *stop = memchr(at, ' ', (size_t)(end - at));
        if (stop == NULL) stop = end;
        if (stop > at && !add_key(keys, at, stop - at, start)) return 0;
        at = stop + 1;
    }
    return 1;
}

/* The index file that takes keys now: store/index_file.py. */
typedef struct {
    Py_buffer memory;
    int64_t slots, next_entry, limit, used_slots, begin_timestamp, end_offset, end_timestamp;
} Index;

static inline int64_t seconds_at(const Index *index, int64_t store_timestamp) {
    if (index->begin_timestamp <= 0 || store_timestamp < index->begin_timestamp) return 0;
    int64_t seconds = (store_timestamp - index->begin_timestamp) / 1000;
    return seconds > INT32_MAX ? INT32_MAX : seconds;
}

/* Put the keys of one record; there must be room for them before the limit. */
static inline void put_keys(Index *index, const Keys *keys, int64_t physical_offset, int64_t store_timestamp) {
    byte *start = index->memory.buf;
    int64_t seconds = seconds_at(index, store_timestamp);
    for (Py_ssize_t n = 0; n < keys->count; n++) {
        int64_t number = index->next_entry;
        byte *slot = start + 40 + 4 * (keys->hashes[n] % index->slots);
        byte *entry = start + 40 + 4 * index->slots + 20 * number;
        int32_t before = (int32_t)get32(slot);
        if (before <= 0 || before > number) before = 0, index->used_slots++;
        entry = put64(put32(entry, keys->hashes[n]), (uint64_t)physical_offset);
        put32(put32(entry, (uint32_t)seconds), (uint32_t)before);
        atomic_thread_fence(memory_order_release); /* a process that dies here leaves a slot that can be put right */
        put32(slot, (uint32_t)number);
        index->next_entry = number + 1;
        index->end_offset = physical_offset;
        index->end_timestamp = store_timestamp;
    }
}

#endif
