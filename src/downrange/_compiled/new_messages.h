/* The class NewMessages: the batch of messages that a store appends. It is what store/new_messages.py is in Python. */
#ifndef DOWNRANGE_NEW_MESSAGES_H
#define DOWNRANGE_NEW_MESSAGES_H

#include "properties.h"
#include "records.h"

#define TRANSACTION_MASK 12

typedef struct {
    const byte *body, *born_host, *store_host; /* in objects that the batch keeps */
    /* Positions in the text of the batch: the topic as a record holds it, its length before its name; the properties. */
    Py_ssize_t topic_at, topic_size, properties_at, properties_size;
    Py_ssize_t body_size, born_host_size, store_host_size;
    Part tags, unique_key, keys;
    int64_t row, queue_id, flag, sys_flag, born_timestamp, reconsume_times, prepared_offset;
    int64_t physical_offset, size, queue_offset, store_timestamp; /* the place of a message that was stored */
    int64_t code;                                /* what its queue entry holds, if has_code */
    PyObject *state;                             /* borrowed from `kept`; NULL: the state of `row` in `by_row` */
    char has_code, is_special, begins_group;
} Message;

/* Always: the first `count` messages are whole, and the first `stored` of them have places. */
typedef struct {
    PyObject_HEAD
    PyObject *by_row; /* owned: the states of all queues by row, or NULL */
    PyObject **kept;  /* owned: the objects that messages point into */
    Message *messages;
    byte *text; /* the topics and properties of all messages */
    Py_ssize_t count, stored, room, kept_count, kept_room, text_size, text_room;
} NewMessages;

extern PyTypeObject new_messages_type;

static inline NewMessages *as_messages(PyObject *object) {
    return Py_IS_TYPE(object, &new_messages_type) ? (NewMessages *)object : NULL;
}

static inline const byte *properties_of(const NewMessages *batch, const Message *message) {
    return batch->text + message->properties_at;
}

static inline const byte *topic_of(const NewMessages *batch, const Message *message) {
    return batch->text + message->topic_at;
}

static inline Py_ssize_t record_size(const Message *message) {
    return FIXED_WITHOUT_HOSTS + message->born_host_size + message->store_host_size + message->topic_size - 1
        + message->body_size + message->properties_size;
}

/* Keep an object for as long as the batch lives; 0 with an exception. */
int keep_object(NewMessages *batch, PyObject *object);
/* Room for so many messages more, so that adding them copies none; 0 with an exception. */
int make_room(NewMessages *batch, Py_ssize_t messages);
/* Room for so many bytes of text more: where they go; NULL with an exception. */
byte *room_for_text(NewMessages *batch, Py_ssize_t size);
/* One more message, all zeros but its properties, which are the last bytes of the text; NULL with an exception. */
Message *add_message(NewMessages *batch, Py_ssize_t properties_size);
/* Take back messages, text and objects that were added last. */
void cut_messages(NewMessages *batch, Py_ssize_t count, Py_ssize_t text_size, Py_ssize_t kept_count);

/* The numbers of a stretch of messages, which two arguments name; 0 when they do not. */
int as_stretch(const NewMessages *batch, PyObject *first, PyObject *stop, Py_ssize_t most, Py_ssize_t *from, Py_ssize_t *to);

#endif
