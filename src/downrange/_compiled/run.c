/* The type Run: store/run.py. */
#include <stddef.h>
#include "run.h"
#include "queue_tails.h"

static const uint64_t HIGH_BITS = 0x8080808080808080u;

static int is_utf8(const byte *at, Py_ssize_t size) {
    uint64_t eight;
    Py_ssize_t n = 0;
    for (; n + 8 <= size; n += 8) {
        memcpy(&eight, at + n, 8);
        if (eight & HIGH_BITS) break;
    }
    while (n < size && at[n] < 0x80) n++;
    if (n == size) return 1;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

Run *new_run(Py_ssize_t messages, Py_ssize_t requests) {
    Run *run = PyObject_New(Run, &run_type);
    if (run == NULL) return NULL;
    memset((byte *)run + offsetof(Run, source), 0, sizeof(Run) - offsetof(Run, source));
    run->room = messages, run->requests_room = requests;
    run->messages = PyMem_Malloc((size_t)messages * sizeof(Message));
    run->sends = PyMem_Malloc((size_t)requests * sizeof(Sent));
    if (run->messages != NULL && run->sends != NULL) return run;
    Py_DECREF(run);
    PyErr_NoMemory();
    return NULL;
}

static void free_run(Run *run) {
    for (Py_ssize_t n = 0; n < run->requests; n++) Py_DECREF(run->sends[n].body);
    Py_XDECREF(run->source);
    Py_XDECREF(run->states);
    PyMem_Free(run->messages);
    PyMem_Free(run->sends);
    PyMem_Free(run->text);
    PyObject_Free(run);
}

byte *room_for_text(Run *run, Py_ssize_t size) {
    if (run->text == NULL || size > run->text_room - run->text_size) {
        Py_ssize_t room = 2 * (run->text_size + size) + 256 * run->requests_room;
        byte *text = PyMem_Realloc(run->text, (size_t)room);
        if (text == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        run->text = text, run->text_room = room;
    }
    byte *at = run->text + run->text_size;
    run->text_size += size;
    return at;
}

Message *add_message(Run *run, Py_ssize_t properties_size) {
    if (!is_utf8(run->text + run->text_size - properties_size, properties_size)) return NULL;
    if (run->count == run->room) {
        Py_ssize_t room = 2 * run->room + 8;
        Message *more = PyMem_Realloc(run->messages, (size_t)room * sizeof(Message));
        if (more == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        run->messages = more, run->room = room;
    }
    Message *message = &run->messages[run->count++];
    message->size = 0;
    message->properties_at = run->text_size - properties_size, message->properties_size = properties_size;
    find_properties(properties_of(run, message), properties_size, &message->tags, &message->unique_key, &message->keys);
    return message;
}

int add_sent(Run *run, PyObject *body, int64_t kind, int64_t opaque, int64_t flag, int64_t queue_id, int64_t count) {
    if (run->requests == run->requests_room) {
        PyErr_NoMemory(); /* as many as there are frames */
        return 0;
    }
    run->sends[run->requests++] = (Sent){Py_NewRef(body), kind, opaque, flag, queue_id, count};
    return 1;
}

void cut_run(Run *run, Py_ssize_t count, Py_ssize_t text_size) {
    run->count = count;
    run->text_size = text_size;
}

/* --- from and to tuples --- */

/* The topic of a queue at the end of the text; its size, or 0. */
static Py_ssize_t put_topic(Run *run, PyObject *state) {
    PyObject *topic = attribute(state, s_topic_field);
    Py_ssize_t size = topic != NULL && PyBytes_CheckExact(topic) ? PyBytes_GET_SIZE(topic) : 0;
    byte *text = size > 0 ? room_for_text(run, size) : NULL;
    if (text != NULL) put_object(text, topic);
    Py_XDECREF(topic);
    return text != NULL ? size : 0;
}

static int take_message(Run *run, PyObject *tuple) {
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != 8) return 0;
    PyObject *state = PyTuple_GET_ITEM(tuple, 0), *body = PyTuple_GET_ITEM(tuple, 1);
    PyObject *properties = PyTuple_GET_ITEM(tuple, 2);
    if (!PyBytes_CheckExact(body) || !PyBytes_CheckExact(properties)) return 0;
    Py_ssize_t topic_at = run->text_size, topic_size = put_topic(run, state);
    byte *text = topic_size > 0 ? room_for_text(run, PyBytes_GET_SIZE(properties)) : NULL;
    if (text == NULL) return 0;
    put_object(text, properties);
    Message *message = add_message(run, PyBytes_GET_SIZE(properties));
    if (message == NULL) return 0;
    PyObject *row = attribute(state, s_row), *queue_id = attribute(state, s_queue_id);
    int is_good = as_number(row, 0, INT64_MAX, &message->row) && as_int32(queue_id, &message->queue_id)
        && as_number(PyTuple_GET_ITEM(tuple, 4), INT64_MIN, INT64_MAX, &message->born_timestamp)
        && as_int32(PyTuple_GET_ITEM(tuple, 5), &message->flag) && as_int32(PyTuple_GET_ITEM(tuple, 6), &message->sys_flag)
        && as_int32(PyTuple_GET_ITEM(tuple, 7), &message->reconsume_times);
    Py_XDECREF(row);
    Py_XDECREF(queue_id);
    if (!is_good) return 0;
    message->topic_at = topic_at, message->topic_size = topic_size;
    message->body = (const byte *)PyBytes_AS_STRING(body), message->body_size = PyBytes_GET_SIZE(body);
    return 1;
}

static int take_sent(Run *run, PyObject *tuple, Py_ssize_t *left) {
    int64_t numbers[5];
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != 5) return 0;
    for (int n = 0; n < 5; n++)
        if (!as_int32(PyTuple_GET_ITEM(tuple, n), &numbers[n])) return 0;
    if (numbers[0] < 0 || numbers[3] < 0 || numbers[4] < 1 || numbers[4] > *left) return 0;
    *left -= numbers[4];
    return add_sent(run, Py_None, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]);
}

/* messages, sends, request code -> run */
PyObject *run_of(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t code;
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) || !as_int32(args[2], &code))
        return refuse();
    Py_ssize_t requests = PyList_GET_SIZE(args[1]);
    PyObject *source = PyList_AsTuple(args[0]); /* whatever happens to the list, these stay */
    if (source == NULL) return NULL;
    Py_ssize_t left = PyTuple_GET_SIZE(source);
    Run *run = new_run(left, requests);
    if (run == NULL) {
        Py_DECREF(source);
        return NULL;
    }
    run->source = source, run->code = code;
    int is_good = 1;
    for (Py_ssize_t n = 0; is_good && n < PyTuple_GET_SIZE(source); n++)
        is_good = take_message(run, PyTuple_GET_ITEM(source, n));
    for (Py_ssize_t n = 0; is_good && n < requests; n++) is_good = take_sent(run, PyList_GET_ITEM(args[1], n), &left);
    if (is_good) return (PyObject *)run;
    Py_DECREF(run);
    return refuse();
}

/* The state of a message's queue, borrowed; NULL with an exception. */
static PyObject *state_of(const Run *run, Py_ssize_t number) {
    if (run->source != NULL) return PyTuple_GET_ITEM(PyTuple_GET_ITEM(run->source, number), 0);
    int64_t row = run->messages[number].row / ROW;
    if (row < PyList_GET_SIZE(run->states)) return PyList_GET_ITEM(run->states, row);
    PyErr_SetString(PyExc_IndexError, "the queue of this message is gone");
    return NULL;
}

static PyObject *message_at(Run *run, Py_ssize_t number) {
    if (number < 0 || number >= run->count) {
        PyErr_SetString(PyExc_IndexError, "no such message");
        return NULL;
    }
    if (run->source != NULL) return Py_NewRef(PyTuple_GET_ITEM(run->source, number));
    const Message *message = &run->messages[number];
    const char *properties = (const char *)properties_of(run, message);
    PyObject *state = state_of(run, number);
    if (state == NULL) return NULL;
    return Py_BuildValue("(Oy#y#s#LLLL)", state, message->body, message->body_size, properties, message->properties_size,
                         properties, message->properties_size, (long long)message->born_timestamp,
                         (long long)message->flag, (long long)message->sys_flag, (long long)message->reconsume_times);
}

/* A list of what `item` makes for each number below `count`. */
static PyObject *list_of(Run *run, Py_ssize_t count, PyObject *(*item)(Run *, Py_ssize_t)) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t n = 0; list != NULL && n < count; n++) {
        PyObject *one = item(run, n);
        if (one == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, n, one);
    }
    return list;
}

static PyObject *new_state(Run *run, Py_ssize_t number) { return Py_XNewRef(state_of(run, number)); }

static PyObject *place_at(Run *run, Py_ssize_t number) {
    const Message *message = &run->messages[number];
    return three_numbers(message->physical_offset, message->size, message->queue_offset);
}

static PyObject *sent_at(Run *run, Py_ssize_t number) {
    const Sent *sent = &run->sends[number];
    return Py_BuildValue("(LLLLL)", (long long)sent->kind, (long long)sent->opaque, (long long)sent->flag,
                         (long long)sent->queue_id, (long long)sent->count);
}

static PyObject *get_messages(Run *run, void *closure) { return list_of(run, run->count, message_at); }

static PyObject *get_states(Run *run, void *closure) { return list_of(run, run->count, new_state); }

static PyObject *get_sends(Run *run, void *closure) { return list_of(run, run->requests, sent_at); }

static PyObject *get_places(Run *run, void *closure) { return list_of(run, has_places(run) ? run->count : 0, place_at); }

static int set_places(Run *run, PyObject *places, void *closure) {
    Py_ssize_t n = places != NULL && PyList_CheckExact(places) && PyList_GET_SIZE(places) == run->count ? 0 : run->count + 1;
    for (; n < run->count; n++) {
        Message *message = &run->messages[n];
        PyObject *place = PyList_GET_ITEM(places, n);
        if (!PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 3
            || !as_number(PyTuple_GET_ITEM(place, 0), 0, INT64_MAX - INT32_MAX, &message->physical_offset)
            || !as_number(PyTuple_GET_ITEM(place, 1), 1, INT32_MAX, &message->size)
            || !as_number(PyTuple_GET_ITEM(place, 2), 0, INT64_MAX - INT32_MAX, &message->queue_offset))
            break;
    }
    if (n == run->count) return 0;
    for (n = 0; n < run->count; n++) run->messages[n].size = 0;
    PyErr_SetString(PyExc_TypeError, "a place for each message is wanted");
    return -1;
}

static PyObject *get_code(Run *run, void *closure) { return PyLong_FromLongLong(run->code); }

static PyObject *get_silent(Run *run, void *closure) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t n = 0; list != NULL && n < run->requests; n++) {
        if (!(run->sends[n].flag & ONEWAY)) continue;
        PyObject *number = PyLong_FromSsize_t(n);
        if (number == NULL || PyList_Append(list, number) < 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

static PyObject *get_requests(Run *run, void *closure) { return PyLong_FromSsize_t(run->requests); }

static PyObject *get_largest(Run *run, void *closure) {
    int64_t largest = 0;
    for (Py_ssize_t n = 0; n < run->count; n++)
        if (run->messages[n].size > largest) largest = run->messages[n].size;
    return PyLong_FromLongLong(largest);
}

static PyObject *get_end(Run *run, void *closure) {
    const Message *last = run->messages + run->count - 1;
    return PyLong_FromLongLong(has_places(run) ? last->physical_offset + last->size : 0);
}

static Py_ssize_t length_of(PyObject *run) { return ((Run *)run)->count; }

static PyGetSetDef attributes[] = {
    {"code", (getter)get_code, NULL, NULL, NULL},
    {"end", (getter)get_end, NULL, NULL, NULL},
    {"largest", (getter)get_largest, NULL, NULL, NULL},
    {"messages", (getter)get_messages, NULL, NULL, NULL},
    {"places", (getter)get_places, (setter)set_places, NULL, NULL},
    {"requests", (getter)get_requests, NULL, NULL, NULL},
    {"sends", (getter)get_sends, NULL, NULL, NULL},
    {"silent", (getter)get_silent, NULL, NULL, NULL},
    {"states", (getter)get_states, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = length_of, .sq_item = (ssizeargfunc)message_at};

PyTypeObject run_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "downrange._steps.Run",
    .tp_basicsize = sizeof(Run),
    .tp_dealloc = (destructor)free_run,
    .tp_as_sequence = &as_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_getset = attributes,
};
