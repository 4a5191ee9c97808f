/* The class SendReplies: the requests of a batch, and what each is answered with; protocol/bodies/send_replies.py. */
#ifndef DOWNRANGE_SEND_REPLIES_H
#define DOWNRANGE_SEND_REPLIES_H

#include "steps.h"

#define ONEWAY 2 /* a bit of a command's flag */

typedef struct {
    PyObject *ready; /* owned: the whole reply; NULL: the reply says where `count` messages from `first` on lie */
    int64_t kind, code, opaque, flag, queue_id;
    Py_ssize_t first, count;
    char waits; /* the request is answered when its messages are safe */
} Sent;

typedef struct {
    PyObject_HEAD
    Sent *requests;
    Py_ssize_t count, room;
} SendReplies;

extern PyTypeObject send_replies_type;
extern PyObject *n_json_pieces, *n_binary_pieces, *n_id_size; /* names of a template's attributes */

static inline SendReplies *as_replies(PyObject *object) {
    return Py_IS_TYPE(object, &send_replies_type) ? (SendReplies *)object : NULL;
}

/* One more request, all zeros; NULL with an exception. */
Sent *add_sent(SendReplies *replies);

#endif
