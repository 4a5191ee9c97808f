/* What a record leaves in its queue and in the key index: hashes of tag and keys, a queue entry, index entries. */
#ifndef DOWNRANGE_DISPATCHING_H
#define DOWNRANGE_DISPATCHING_H

#include <stdatomic.h>
#include "queue_tails.h"

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
    put_native(start + 8 * BLOCKS_IN_USE, (int64_t)((uint64_t)get_native(start + 8 * BLOCKS_IN_USE) + 1));
    put_native(start + block, at ? at - BLOCK : 0);
    return block + FIRST;
}

/* A key as the index has it. */
typedef struct {
    uint32_t hash;
    int64_t physical_offset, store_timestamp;
} Key;

typedef struct {
    Key *keys;
    Py_ssize_t count, room;
} Keys;

static inline int add_key(Keys *keys, const byte *at, Py_ssize_t size, uint32_t hash, int64_t physical_offset,
                          int64_t store_timestamp) {
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
    keys->keys[keys->count++] = (Key){hash, physical_offset, store_timestamp};
    return 1;
}

/* The hash of the unique id, then those of the words of KEYS; `start` is that of the topic and a '#'. */
static inline int add_keys(
    Keys *keys, const byte *unique, Py_ssize_t unique_size, const byte *words, Py_ssize_t words_size, uint32_t start,
    int64_t physical_offset, int64_t store_timestamp) {
    if (unique_size && !add_key(keys, unique, unique_size, start, physical_offset, store_timestamp)) return 0;
    for (const byte *at = words, *end = words + words_size; at < end;) {
        const byte *stop = memchr(at, ' ', (size_t)(end - at));
        if (stop == NULL) stop = end;
        if (stop > at && !add_key(keys, at, stop - at, start, physical_offset, store_timestamp)) return 0;
        at = stop + 1;
    }
    return 1;
}

/* The index file that takes keys now: store/index/index_file.py. */
typedef struct {
    Py_buffer memory;
    int64_t slots, next_entry, limit, used_slots, begin_timestamp, end_offset, end_timestamp;
} Index;

/* Does the file have the slots and entries that it is said to have? */
static inline int is_index(const Index *index) {
    return 40 + 4 * index->slots + 20 * index->limit <= index->memory.len;
}

/* The time as entries hold it: seconds since the file's begin, no more than they can hold. */
static inline int64_t seconds_at(const Index *index, int64_t store_timestamp) {
    if (index->begin_timestamp <= 0 || store_timestamp < index->begin_timestamp) return 0;
    int64_t seconds = (store_timestamp - index->begin_timestamp) / 1000;
    return seconds > INT32_MAX ? INT32_MAX : seconds;
}

/* Put keys, for which there must be room before the limit. */
static inline void put_keys(Index *index, const Keys *keys) {
    byte *slots = (byte *)index->memory.buf + 40, *entries = slots + 4 * index->slots;
    for (Py_ssize_t n = 0; n < keys->count; n++) fetch(slots + 4 * (keys->keys[n].hash % index->slots));
    for (Py_ssize_t n = 0; n < keys->count; n++) {
        const Key *key = &keys->keys[n];
        int64_t number = index->next_entry++;
        byte *slot = slots + 4 * (key->hash % index->slots);
        int32_t before = (int32_t)get32(slot);
        if (before <= 0 || before > number) before = 0, index->used_slots++;
        byte *entry = put64(put32(entries + 20 * number, key->hash), (uint64_t)key->physical_offset);
        put32(put32(entry, (uint32_t)seconds_at(index, key->store_timestamp)), (uint32_t)before);
        atomic_thread_fence(memory_order_release); /* a process that dies here leaves a slot that can be put right */
        put32(slot, (uint32_t)number);
        index->end_offset = key->physical_offset, index->end_timestamp = key->store_timestamp;
    }
}

#endif
