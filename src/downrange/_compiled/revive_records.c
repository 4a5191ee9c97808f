/* Records of the revive topic, straight into a batch: add_checkpoints and add_acknowledgements of broker/pop/records.py. */
#include "new_messages.h"

#define MOST_BITS 63
#define MOST_DIGITS 20
#define CK_EARLIER_MILLIS 1000 /* that of broker/pop/records.py */

static PyObject *s_key, *s_held, *s_invisible_time, *s_revive_queue, *s_visible_at;

/* One call: what records are made of. All objects are borrowed. */
typedef struct {
    NewMessages *batch;
    PyObject *texts, *states, *topic, *host;
    int64_t fits, now;
    PyObject *last_topic, *last_group, *last_texts; /* of the lease before: mostly the next one has these, too */
} Adding;

/* What a lease says; the texts belong to the lease. */
typedef struct {
    PyObject *topic, *group;
    int64_t queue_id, start, pop_time, held, invisible_time, revive_queue, visible_at;
} Lease;

/* 0 for a lease that is left to Python, perhaps with an exception. */
static int open_lease(PyObject *object, Lease *lease) {
    PyObject *key = PyObject_GetAttr(object, s_key);
    int is_good = key != NULL && PyTuple_Check(key) && PyTuple_GET_SIZE(key) == 5
        && PyUnicode_CheckExact(PyTuple_GET_ITEM(key, 0)) && PyUnicode_CheckExact(PyTuple_GET_ITEM(key, 1))
        && as_number(PyTuple_GET_ITEM(key, 2), 0, INT32_MAX, &lease->queue_id)
        && as_number(PyTuple_GET_ITEM(key, 3), 0, INT64_MAX - MOST_BITS, &lease->start)
        && as_number(PyTuple_GET_ITEM(key, 4), INT64_MIN, INT64_MAX, &lease->pop_time);
    if (is_good) lease->topic = PyTuple_GET_ITEM(key, 0), lease->group = PyTuple_GET_ITEM(key, 1);
    Py_XDECREF(key);
    return is_good && number_of(object, s_held, 0, INT64_MAX, &lease->held)
        && number_of(object, s_invisible_time, INT64_MIN, INT64_MAX, &lease->invisible_time)
        && number_of(object, s_revive_queue, 0, INT32_MAX, &lease->revive_queue)
        && number_of(object, s_visible_at, INT64_MIN + CK_EARLIER_MILLIS, INT64_MAX, &lease->visible_at);
}

/* The pieces of a text about a lease, which are so many; NULL when there are none, perhaps with an exception. */
static PyObject *pieces_for(Adding *to, const Lease *lease, Py_ssize_t which, Py_ssize_t count, Py_ssize_t *size) {
    if (lease->topic != to->last_topic || lease->group != to->last_group) {
        PyObject *key = PyTuple_Pack(2, lease->topic, lease->group);
        PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(to->texts, key);
        Py_XDECREF(key);
        if (found == NULL || !PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 3) return NULL;
        to->last_topic = lease->topic, to->last_group = lease->group, to->last_texts = found;
    }
    PyObject *pieces = PyTuple_GET_ITEM(to->last_texts, which);
    return (*size = measure(pieces, count)) < 0 ? NULL : pieces;
}

/* A text with a list of offsets and numbers. */
static PyObject *make_body(PyObject *pieces, Py_ssize_t size, int64_t start, int64_t bits, const int64_t *numbers, int count) {
    Py_ssize_t most = size + (__builtin_popcountll((uint64_t)bits) + count) * (MOST_DIGITS + 1);
    PyObject *body = PyBytes_FromStringAndSize(NULL, most);
    if (body == NULL) return NULL;
    byte *begin = (byte *)PyBytes_AS_STRING(body);
    byte *at = put_offsets(put_object(begin, PyTuple_GET_ITEM(pieces, 0)), start, bits);
    for (int n = 0; n < count; n++) at = put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, n + 1)), numbers[n]);
    at = put_object(at, PyTuple_GET_ITEM(pieces, count + 1));
    _PyBytes_Resize(&body, at - begin);
    return body;
}

/* The queue of a record; NULL for a queue that is missing or special, perhaps with an exception. */
static PyObject *queue_of(const Adding *to, int64_t revive_queue, Message *message, PyObject **topic_field) {
    PyObject *number = PyLong_FromLongLong(revive_queue), *key = number == NULL ? NULL : PyTuple_Pack(2, to->topic, number);
    PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(to->states, key);
    PyObject *is_special = state == NULL ? NULL : PyObject_GetAttr(state, s_is_special);
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_XDECREF(is_special);
    if (is_special != Py_False || !number_of(state, s_row, 0, INT64_MAX, &message->row)) return NULL;
    *topic_field = PyObject_GetAttr(state, s_topic_field);
    return *topic_field == NULL ? NULL : state;
}

static byte *put_properties(byte *at, int64_t due, const char *tags) {
    static const char start[] = "TIMER_DELIVER_MS\x01", behind[] = "\x02TAGS\x01";
    at = put_decimal(put_bytes(at, start, (Py_ssize_t)strlen(start)), due);
    return put_bytes(put_bytes(at, behind, (Py_ssize_t)strlen(behind)), tags, (Py_ssize_t)strlen(tags));
}

/* Add one record; 0 for what is left to Python, perhaps with an exception. */
static int add_record(Adding *to, int64_t revive_queue, PyObject *body, int64_t due, const char *tags) {
    byte properties[96];
    Message message = {0};
    PyObject *topic_field = NULL;
    NewMessages *batch = to->batch;
    Py_ssize_t properties_size = put_properties(properties, due, tags) - properties;
    PyObject *state = queue_of(to, revive_queue, &message, &topic_field);
    int is_good = state != NULL && PyBytes_CheckExact(topic_field) && PyBytes_GET_SIZE(topic_field) > 0
        && PyBytes_GET_SIZE(body) + properties_size <= to->fits && keep_object(batch, body) && keep_object(batch, state)
        && keep_object(batch, to->host);
    byte *text = is_good ? room_for_text(batch, PyBytes_GET_SIZE(topic_field) + properties_size) : NULL;
    if (text != NULL) {
        message.topic_at = text - batch->text, message.topic_size = PyBytes_GET_SIZE(topic_field);
        put_bytes(put_object(text, topic_field), properties, properties_size);
        Message *added = add_message(batch, properties_size);
        if (added == NULL) text = NULL;
        else {
            added->topic_at = message.topic_at, added->topic_size = message.topic_size;
            added->row = message.row, added->queue_id = revive_queue, added->born_timestamp = to->now;
            added->body = (const byte *)PyBytes_AS_STRING(body), added->body_size = PyBytes_GET_SIZE(body);
            added->born_host = added->store_host = (const byte *)PyBytes_AS_STRING(to->host);
            added->born_host_size = added->store_host_size = PyBytes_GET_SIZE(to->host);
            added->state = state, added->begins_group = 1;
        }
    }
    Py_XDECREF(topic_field);
    return text != NULL;
}

static int add_checkpoint(Adding *to, PyObject *object) {
    Lease lease;
    Py_ssize_t size;
    PyObject *pieces = open_lease(object, &lease) ? pieces_for(to, &lease, 0, 8, &size) : NULL;
    if (pieces == NULL) return 0;
    int64_t numbers[] = {lease.invisible_time, __builtin_popcountll((uint64_t)lease.held), lease.pop_time, lease.queue_id,
                         lease.visible_at, lease.start};
    PyObject *body = make_body(pieces, size, 0, lease.held, numbers, 6);
    int is_added = body != NULL && add_record(to, lease.revive_queue, body, lease.visible_at - CK_EARLIER_MILLIS, "ck");
    Py_XDECREF(body);
    return is_added;
}

static int add_acknowledgement(Adding *to, PyObject *pair) {
    Lease lease;
    Py_ssize_t size;
    int64_t bits;
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 || !as_number(PyTuple_GET_ITEM(pair, 1), 0, INT64_MAX, &bits)
        || !open_lease(PyTuple_GET_ITEM(pair, 0), &lease))
        return 0;
    int is_batch = (bits & (bits - 1)) != 0;
    PyObject *pieces = pieces_for(to, &lease, is_batch ? 2 : 1, 5, &size);
    if (pieces == NULL) return 0;
    int64_t numbers[] = {lease.pop_time, lease.queue_id, lease.start};
    PyObject *body = make_body(pieces, size, lease.start, bits, numbers, 3);
    int is_added = body != NULL && add_record(to, lease.revive_queue, body, lease.visible_at, is_batch ? "bAck" : "ack");
    Py_XDECREF(body);
    return is_added;
}

/* batch, leases, texts, (states, topic, host), fits, now -> whether records were added: all or none */
static PyObject *add_all(const char *name, PyObject *const *args, Py_ssize_t count, int (*add)(Adding *, PyObject *)) {
    Adding to = {.batch = count == 6 ? as_messages(args[0]) : NULL};
    if (to.batch == NULL || !PyList_CheckExact(args[1]) || !PyDict_CheckExact(args[2]) || !PyTuple_CheckExact(args[3])
        || PyTuple_GET_SIZE(args[3]) != 3 || !as_number(args[4], 0, INT32_MAX, &to.fits)
        || !as_number(args[5], INT64_MIN, INT64_MAX, &to.now))
        return wrong_arguments(name);
    to.texts = args[2], to.states = PyTuple_GET_ITEM(args[3], 0), to.topic = PyTuple_GET_ITEM(args[3], 1);
    to.host = PyTuple_GET_ITEM(args[3], 2);
    if (!PyDict_Check(to.states) || !PyUnicode_CheckExact(to.topic) || !PyBytes_CheckExact(to.host)
        || (PyBytes_GET_SIZE(to.host) != 8 && PyBytes_GET_SIZE(to.host) != 20))
        return wrong_arguments(name);
    Py_ssize_t messages = to.batch->count, text_size = to.batch->text_size, kept_count = to.batch->kept_count;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[1]); n++) {
        if (add(&to, PyList_GET_ITEM(args[1], n))) continue;
        cut_messages(to.batch, messages, text_size, kept_count);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    }
    Py_RETURN_TRUE;
}

PyObject *add_checkpoints(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    return add_all("add_checkpoints", args, count, add_checkpoint);
}

PyObject *add_acknowledgements(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    return add_all("add_acknowledgements", args, count, add_acknowledgement);
}

int make_lease_names(void) {
    s_key = PyUnicode_InternFromString("key");
    s_held = PyUnicode_InternFromString("held");
    s_invisible_time = PyUnicode_InternFromString("invisible_time");
    s_revive_queue = PyUnicode_InternFromString("revive_queue");
    s_visible_at = PyUnicode_InternFromString("visible_at");
    return s_key && s_held && s_invisible_time && s_revive_queue && s_visible_at;
}
