/* The rows of a topic's queues, by the topic's bytes: what broker/handlers/usual_sends.py knows, for usual_sends.c,
   and which queues were met in the log, for read_records.c and due.c. */
#ifndef DOWNRANGE_TOPIC_TABLE_H
#define DOWNRANGE_TOPIC_TABLE_H

#include "steps.h"

#define NEAR 48

/* As much memory as a processor fetches at once, so that looking up a topic is one wait. */
typedef struct {
    uint32_t hash;
    int32_t size;    /* of what is known of the topic; 0 when this place is free */
    PyObject *packed; /* owned */
    byte near[NEAR]; /* the same, if it is not larger */
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

uint32_t hash_topic(const TopicTable *table, const byte *topic, Py_ssize_t size);
/* 0 when the topic is not known. What is found is there until the table changes. */
int find_topic(const TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, Destination *found);
/* Remember what broker/handlers/usual_sends.py has packed; 0 when it is not that, or with an exception. */
int keep_topic(TopicTable *table, uint32_t hash, PyObject *packed);

/* Remember the row of one more queue; 0 when it is not one to remember, or with an exception. */
int keep_row(TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, int64_t queue_id, int64_t row);

/* The row of a queue that is there; -1 of any other. */
static inline int64_t row_of_queue(const Destination *destination, int64_t queue_id) {
    int32_t row;
    if (queue_id < 0 || queue_id >= destination->queues) return -1;
    memcpy(&row, destination->rows + queue_id * (int64_t)sizeof row, sizeof row);
    return row;
}

/* The row of a queue, from the table or from `by_topic` (queues by raw topic and id), and then it is remembered; -1 when it is
   not known, or special, or with an exception. */
int64_t find_row(PyObject *by_topic, TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, int64_t queue_id);

/* Ask for the place where the topic with this hash most likely is. */
static inline void fetch_topic(const TopicTable *table, uint32_t hash) {
    __builtin_prefetch(&table->slots[hash & table->mask]);
}

#endif
