/* The numbers and newest entries of all queues: the layout of store/queue/queue_tails.py. */
#ifndef DOWNRANGE_QUEUE_TAILS_H
#define DOWNRANGE_QUEUE_TAILS_H

#include "steps.h"

enum { NEXT, END, PHYSICAL_END, AT, MESSAGES, BYTES, SPILL_AT, START, ROW };
enum { FREE_BLOCK, USED_BYTES, BLOCKS_IN_USE };
#define BLOCK 256
#define FIRST 16
_Static_assert(ROW == 8 && (BLOCK - FIRST) % ENTRY_SIZE == 0, "the layout of store/queue/queue_tails.py");

/* Reading from far memory takes as long as a hundred steps; asked for together, many places take as long as one. */
static inline void fetch(const void *at) { __builtin_prefetch(at, 1); }

/* The row of a queue; NULL when `row` does not name one. */
static inline int64_t *row_at(const Py_buffer *rows, int64_t row) {
    if (row < 0 || row % ROW || row > rows->len / (Py_ssize_t)sizeof(int64_t) - ROW) return NULL;
    return (int64_t *)rows->buf + row;
}

/* Writable memory that begins where numbers may; 0 without an exception. */
static inline int take_buffer(PyObject *object, Py_buffer *memory) {
    if (PyObject_GetBuffer(object, memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    return (uintptr_t)memory->buf % sizeof(int64_t) == 0;
}

static inline int64_t get_native(const byte *at) {
    int64_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline void put_native(byte *at, int64_t number) { memcpy(at, &number, sizeof number); }

#endif
