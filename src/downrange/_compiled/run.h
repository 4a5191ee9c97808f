/* The messages of a run: made of frames by plain_sends.c, stored by append_run.c and apply_run.c, answered by
   encode_replies.c. What store/run.py is in Python. */
#ifndef DOWNRANGE_RUN_H
#define DOWNRANGE_RUN_H

#include "properties.h"

#define ONEWAY 2 /* a bit of a command's flag */

typedef struct {
    const byte *body;      /* in an object that the run keeps */
    const byte *born_host; /* while it is appended */
    /* In the run's text: the topic as a record holds it, which has its length before its name; properties. */
    Py_ssize_t topic_at, topic_size, properties_at, properties_size;
    Py_ssize_t body_size, born_host_size;
    Part tags, unique_key, keys;
    int64_t row, queue_id, flag, sys_flag, born_timestamp, reconsume_times;
    int64_t physical_offset, size, queue_offset; /* its place, once it has one */
} Message;

typedef struct {
    PyObject *body; /* owned */
    int64_t kind, opaque, flag, queue_id, count;
} Sent;

/* Always: the first `count` messages and `requests` sends are whole. `size` of all messages is 0, or all have places,
   which are within the bounds of `set_places`. */
typedef struct {
    PyObject_HEAD
    PyObject *source; /* owned: the messages as tuples, when it was made of those */
    PyObject *states; /* owned: the states of all queues, by row */
    Message *messages;
    Sent *sends;
    byte *text; /* the topics and properties of all messages */
    Py_ssize_t count, requests, text_size, room, requests_room, text_room;
    int64_t code;
} Run;

extern PyTypeObject run_type;

static inline Run *as_run(PyObject *object) { return Py_IS_TYPE(object, &run_type) ? (Run *)object : NULL; }

static inline const byte *properties_of(const Run *run, const Message *message) {
    return run->text + message->properties_at;
}

static inline const byte *topic_of(const Run *run, const Message *message) { return run->text + message->topic_at; }

static inline int has_places(const Run *run) { return run->count > 0 && run->messages[0].size > 0; }

/* An empty run; NULL with an exception. */
Run *new_run(Py_ssize_t messages, Py_ssize_t requests);
/* Room for so many bytes of text more: where they go; NULL with an exception. */
byte *room_for_text(Run *run, Py_ssize_t size);
/* A message whose properties are the last `properties_size` bytes of the text; NULL when that is no UTF-8, or with an
   exception. */
Message *add_message(Run *run, Py_ssize_t properties_size);
/* A send whose messages were added; 0 with an exception. */
int add_sent(Run *run, PyObject *body, int64_t kind, int64_t opaque, int64_t flag, int64_t queue_id, int64_t count);
/* Take back what was added last. */
void cut_run(Run *run, Py_ssize_t count, Py_ssize_t text_size);

PyObject *run_of(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
