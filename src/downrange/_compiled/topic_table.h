/* Where the messages of a topic may go, by the topic's bytes: what broker/destinations.py knows, for plain_sends.c. */
#ifndef DOWNRANGE_TOPIC_TABLE_H
#define DOWNRANGE_TOPIC_TABLE_H

#include "runs.h"

typedef struct {
    uint64_t hash;
    PyObject *packed; /* owned; NULL when this place is free */
} Slot;

/* A dictionary would do, but for one thing: with ten thousand topics none of it is in the processor's cache, and only of
   memory that one knows one can ask for many pieces at once. */
typedef struct {
    PyObject_HEAD
    Slot *slots;
    uint64_t mask, seed;
    Py_ssize_t used;
} TopicTable;

/* How many queues, the row of each (-1: there is none), the topic as a record holds it. */
typedef struct {
    int32_t queues;
    const byte *rows, *topic;
    Py_ssize_t topic_size;
} Destination;

extern PyTypeObject topic_table_type;

uint64_t hash_topic(const TopicTable *table, const byte *topic, Py_ssize_t size);
/* 0 when this is not what broker/destinations.py packs. */
int read_destination(PyObject *packed, Destination *destination);
/* Borrowed; NULL when the topic is not known. */
PyObject *find_topic(const TopicTable *table, uint64_t hash, const byte *topic, Py_ssize_t size);
/* Remember a topic that is not known; 0 with an exception. */
int keep_topic(TopicTable *table, uint64_t hash, PyObject *packed);

/* Ask for the places where the topic with this hash may be; then for what is there. */
static inline void fetch_slot(const TopicTable *table, uint64_t hash) {
    __builtin_prefetch(&table->slots[hash & table->mask]);
}

static inline void fetch_topic(const TopicTable *table, uint64_t hash) {
    const PyObject *packed = table->slots[hash & table->mask].packed;
    if (packed != NULL) {
        __builtin_prefetch(packed, 1); /* its references are counted */
        __builtin_prefetch((const byte *)packed + 64);
    }
}

#endif
