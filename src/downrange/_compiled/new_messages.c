/* The class NewMessages: store/new_messages.py. */
#include <stddef.h>
#include "new_messages.h"
#include "queue_tails.h"

static PyObject *n_body, *n_properties, *n_born_timestamp, *n_born_host, *n_store_host, *n_flag, *n_sys_flag;
static PyObject *n_reconsume_times, *n_prepared;

static PyObject *new_batch(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    if (!PyArg_ParseTuple(args, "") || (keywords != NULL && PyDict_GET_SIZE(keywords) > 0)) return NULL;
    return type->tp_alloc(type, 0);
}

static void free_batch(NewMessages *batch) {
    for (Py_ssize_t n = 0; n < batch->kept_count; n++) Py_DECREF(batch->kept[n]);
    Py_XDECREF(batch->by_row);
    PyMem_Free(batch->kept);
    PyMem_Free(batch->messages);
    PyMem_Free(batch->text);
    Py_TYPE(batch)->tp_free(batch);
}

/* An array with room for one more item; NULL with an exception, and the array stays as it was. */
static void *with_room(void *array, Py_ssize_t count, Py_ssize_t *room, size_t item) {
    if (count < *room) return array;
    Py_ssize_t wanted = 4 * *room + 8;
    void *larger = PyMem_Realloc(array, (size_t)wanted * item);
    if (larger == NULL) PyErr_NoMemory();
    else *room = wanted;
    return larger;
}

int make_room(NewMessages *batch, Py_ssize_t messages) {
    Py_ssize_t wanted = batch->count + messages;
    if (wanted <= batch->room) return 1;
    Message *larger = PyMem_Realloc(batch->messages, (size_t)wanted * sizeof *larger);
    if (larger == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    batch->messages = larger, batch->room = wanted;
    return 1;
}

int keep_object(NewMessages *batch, PyObject *object) {
    PyObject **kept = with_room(batch->kept, batch->kept_count, &batch->kept_room, sizeof *kept);
    if (kept == NULL) return 0;
    batch->kept = kept;
    kept[batch->kept_count++] = Py_NewRef(object);
    return 1;
}

byte *room_for_text(NewMessages *batch, Py_ssize_t size) {
    if (batch->text == NULL || size > batch->text_room - batch->text_size) {
        Py_ssize_t room = 2 * (batch->text_size + size) + 4096;
        byte *text = PyMem_Realloc(batch->text, (size_t)room);
        if (text == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        batch->text = text, batch->text_room = room;
    }
    byte *at = batch->text + batch->text_size;
    batch->text_size += size;
    return at;
}

Message *add_message(NewMessages *batch, Py_ssize_t properties_size) {
    Message *messages = with_room(batch->messages, batch->count, &batch->room, sizeof *messages);
    if (messages == NULL) return NULL;
    batch->messages = messages;
    Message *message = &messages[batch->count++];
    memset(message, 0, sizeof *message);
    message->properties_at = batch->text_size - properties_size, message->properties_size = properties_size;
    find_properties(properties_of(batch, message), properties_size, &message->tags, &message->unique_key, &message->keys);
    return message;
}

void cut_messages(NewMessages *batch, Py_ssize_t count, Py_ssize_t text_size, Py_ssize_t kept_count) {
    batch->count = count;
    batch->text_size = text_size;
    while (batch->kept_count > kept_count) Py_DECREF(batch->kept[--batch->kept_count]);
}

int as_stretch(const NewMessages *batch, PyObject *first, PyObject *stop, Py_ssize_t most, Py_ssize_t *from, Py_ssize_t *to) {
    int64_t begin, end;
    if (batch == NULL || !as_number(first, 0, most, &begin) || !as_number(stop, begin, most, &end)) return 0;
    *from = (Py_ssize_t)begin, *to = (Py_ssize_t)end;
    return 1;
}

/* --- adding Python's messages --- */

static int take_number(PyObject *object, PyObject *name, int64_t least, int64_t most, int64_t *number) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) return 0;
    int overflow = 1;
    if (PyLong_Check(value)) *number = PyLong_AsLongLongAndOverflow(value, &overflow); /* flags are of an int's subclass */
    int is_good = !overflow && least <= *number && *number <= most;
    if (!is_good) PyErr_Format(PyExc_TypeError, "%U is %R", name, value);
    Py_DECREF(value);
    return is_good;
}

/* The bytes of an attribute, in an object that the batch keeps; NULL with an exception. */
static const byte *take_bytes(NewMessages *batch, PyObject *object, PyObject *name, Py_ssize_t *size) {
    PyObject *value = PyObject_GetAttr(object, name);
    const byte *bytes = NULL;
    if (value == NULL) return NULL;
    if (!PyBytes_CheckExact(value)) PyErr_Format(PyExc_TypeError, "%U is %R", name, value);
    else if (keep_object(batch, value)) bytes = (const byte *)PyBytes_AS_STRING(value), *size = PyBytes_GET_SIZE(value);
    Py_DECREF(value);
    return bytes;
}

static int is_host_size(Py_ssize_t size) { return size == 8 || size == 20; }

static int take_message(NewMessages *batch, PyObject *state, PyObject *from, int begins_group) {
    Py_ssize_t topic_size, properties_size;
    Message message = {0};
    const byte *topic = take_bytes(batch, state, s_topic_field, &topic_size);
    const byte *properties = topic == NULL ? NULL : take_bytes(batch, from, n_properties, &properties_size);
    if (properties == NULL || (message.body = take_bytes(batch, from, n_body, &message.body_size)) == NULL
        || (message.born_host = take_bytes(batch, from, n_born_host, &message.born_host_size)) == NULL
        || (message.store_host = take_bytes(batch, from, n_store_host, &message.store_host_size)) == NULL
        || !take_number(state, s_row, 0, INT64_MAX, &message.row)
        || !take_number(state, s_queue_id, 0, INT32_MAX, &message.queue_id)
        || !take_number(from, n_flag, INT32_MIN, INT32_MAX, &message.flag)
        || !take_number(from, n_sys_flag, INT32_MIN, INT32_MAX, &message.sys_flag)
        || !take_number(from, n_born_timestamp, INT64_MIN, INT64_MAX, &message.born_timestamp)
        || !take_number(from, n_reconsume_times, INT32_MIN, INT32_MAX, &message.reconsume_times)
        || !take_number(from, n_prepared, INT64_MIN, INT64_MAX, &message.prepared_offset) || !keep_object(batch, state))
        return 0;
    PyObject *is_special = PyObject_GetAttr(state, s_is_special);
    if (is_special == NULL) return 0;
    message.is_special = is_special == Py_True;
    Py_DECREF(is_special);
    if (topic_size == 0 || !is_host_size(message.born_host_size) || !is_host_size(message.store_host_size)
        || properties_size > INT16_MAX || (!begins_group && batch->count == 0)) {
        PyErr_SetString(PyExc_TypeError, "NewMessages.add: a message with a topic, two hosts and at most 32767 bytes of"
                                         " properties is expected, and a group must begin before it goes on");
        return 0;
    }
    message.topic_at = batch->text_size, message.topic_size = topic_size;
    byte *text = room_for_text(batch, topic_size + properties_size);
    if (text == NULL) return 0;
    put_bytes(put_bytes(text, topic, topic_size), properties, properties_size);
    Message *added = add_message(batch, properties_size);
    if (added == NULL) return 0;
    message.properties_at = added->properties_at, message.properties_size = properties_size;
    message.tags = added->tags, message.unique_key = added->unique_key, message.keys = added->keys;
    message.state = state, message.begins_group = (char)begins_group;
    *added = message;
    return 1;
}

/* state, message, begins a group */
static PyObject *batch_add(NewMessages *batch, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyBool_Check(args[2])) return wrong_arguments("NewMessages.add");
    Py_ssize_t text_size = batch->text_size, kept_count = batch->kept_count, messages = batch->count;
    if (take_message(batch, args[0], args[1], args[2] == Py_True)) Py_RETURN_NONE;
    cut_messages(batch, messages, text_size, kept_count);
    return NULL;
}

/* --- looking --- */

/* The message with this number; NULL with an exception. */
static Message *message_at(const NewMessages *batch, PyObject *number) {
    int64_t n;
    if (as_number(number, 0, batch->count - 1, &n)) return &batch->messages[n];
    PyErr_Format(PyExc_IndexError, "there is no message %R", number);
    return NULL;
}

/* The state of a message's queue, as a new reference; NULL with an exception. */
static PyObject *state_of(const NewMessages *batch, const Message *message) {
    if (message->state != NULL) return Py_NewRef(message->state);
    int64_t row = message->row / ROW;
    if (batch->by_row != NULL && row < PyList_GET_SIZE(batch->by_row))
        return Py_NewRef(PyList_GET_ITEM(batch->by_row, row));
    PyErr_SetString(PyExc_IndexError, "the queue of this message is gone");
    return NULL;
}

static PyObject *properties_bytes(const NewMessages *batch, const Message *message) {
    return PyBytes_FromStringAndSize((const char *)properties_of(batch, message), message->properties_size);
}

static PyObject *batch_properties(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number);
    return message == NULL ? NULL : properties_bytes(batch, message);
}

static PyObject *batch_properties_for(NewMessages *batch, PyObject *wanted) {
    PyObject *found = PyList_New(0);
    for (Py_ssize_t n = 0; found != NULL && n < batch->count; n++) {
        PyObject *state = state_of(batch, &batch->messages[n]);
        PyObject *one = state == wanted ? properties_bytes(batch, &batch->messages[n]) : NULL;
        if (state == NULL || (state == wanted && (one == NULL || PyList_Append(found, one) < 0))) Py_CLEAR(found);
        Py_XDECREF(state);
        Py_XDECREF(one);
    }
    return found;
}

static PyObject *part_text(const NewMessages *batch, const Message *message, Part part) {
    if (part.size == 0) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8((const char *)properties_of(batch, message) + part.at, part.size, "replace");
}

static PyObject *batch_tags(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number);
    return message == NULL ? NULL : part_text(batch, message, message->tags);
}

static PyObject *keyed_of(const NewMessages *batch, const Message *message) {
    const char *topic = (const char *)topic_of(batch, message) + 1;
    return Py_BuildValue("(NNNLL)", PyUnicode_DecodeUTF8(topic, message->topic_size - 1, "replace"),
                         part_text(batch, message, message->unique_key), part_text(batch, message, message->keys),
                         (long long)message->physical_offset, (long long)message->store_timestamp);
}

/* number, stop */
static PyObject *batch_keyed(NewMessages *batch, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t from, to;
    if (count != 2 || !as_stretch(batch, args[0], args[1], batch->stored, &from, &to))
        return wrong_arguments("NewMessages.keyed");
    PyObject *list = PyList_New(0);
    for (const Message *message = batch->messages + from; list != NULL && message < batch->messages + to; message++) {
        if ((message->unique_key.size == 0 && message->keys.size == 0)
            || (message->sys_flag & TRANSACTION_MASK) == TRANSACTION_MASK)
            continue;
        PyObject *one = keyed_of(batch, message);
        if (one == NULL || PyList_Append(list, one) < 0) Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static PyObject *batch_timestamp(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number);
    return message == NULL ? NULL : PyLong_FromLongLong(message->store_timestamp);
}

static PyObject *batch_cut(NewMessages *batch, PyObject *number) {
    int64_t count;
    if (!as_number(number, 0, batch->count, &count)) return wrong_arguments("NewMessages.cut");
    batch->count = (Py_ssize_t)count;
    if (batch->stored > batch->count) batch->stored = batch->count;
    Py_RETURN_NONE;
}

/* places, store timestamp */
static PyObject *batch_place(NewMessages *batch, PyObject *const *args, Py_ssize_t count) {
    int64_t store_timestamp;
    if (count != 2 || !PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) > batch->count - batch->stored
        || !as_number(args[1], INT64_MIN, INT64_MAX, &store_timestamp))
        return wrong_arguments("NewMessages.place");
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[0]); n++) {
        Message *message = &batch->messages[batch->stored];
        PyObject *place = PyList_GET_ITEM(args[0], n);
        if (!PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 3
            || !as_number(PyTuple_GET_ITEM(place, 0), 0, INT64_MAX - INT32_MAX, &message->physical_offset)
            || !as_number(PyTuple_GET_ITEM(place, 1), 1, INT32_MAX, &message->size)
            || !as_number(PyTuple_GET_ITEM(place, 2), 0, INT64_MAX / ENTRY_SIZE, &message->queue_offset))
            return wrong_arguments("NewMessages.place");
        message->store_timestamp = store_timestamp;
        batch->stored++;
    }
    Py_RETURN_NONE;
}

static PyObject *batch_sys_flag(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number);
    return message == NULL ? NULL : PyLong_FromLongLong(message->sys_flag);
}

static PyObject *batch_code(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number);
    if (message == NULL) return NULL;
    return message->has_code ? PyLong_FromLongLong(message->code) : Py_NewRef(Py_None);
}

/* number, code */
static PyObject *batch_set_code(NewMessages *batch, PyObject *const *args, Py_ssize_t count) {
    int64_t code;
    if (count != 2 || !as_number(args[1], INT64_MIN, INT64_MAX, &code)) return wrong_arguments("NewMessages.set_code");
    Message *message = message_at(batch, args[0]);
    if (message == NULL) return NULL;
    message->code = code, message->has_code = 1;
    Py_RETURN_NONE;
}

static PyObject *batch_group_size(NewMessages *batch, PyObject *number) {
    const Message *message = message_at(batch, number), *end = batch->messages + batch->count;
    if (message == NULL) return NULL;
    Py_ssize_t size = record_size(message);
    while (++message < end && !message->begins_group) size += record_size(message);
    return PyLong_FromSsize_t(size);
}

static PyObject *place_of(const NewMessages *batch, Py_ssize_t number) {
    const Message *message = &batch->messages[number];
    return three_numbers(message->physical_offset, message->size, message->queue_offset);
}

static PyObject *state_at(const NewMessages *batch, Py_ssize_t number) { return state_of(batch, &batch->messages[number]); }

/* A list of what `item` makes for each number below `count`. */
static PyObject *list_of(const NewMessages *batch, Py_ssize_t count, PyObject *(*item)(const NewMessages *, Py_ssize_t)) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t n = 0; list != NULL && n < count; n++) {
        PyObject *one = item(batch, n);
        if (one == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, n, one);
    }
    return list;
}

static PyObject *get_places(NewMessages *batch, void *Py_UNUSED(closure)) { return list_of(batch, batch->stored, place_of); }

static PyObject *get_states(NewMessages *batch, void *Py_UNUSED(closure)) { return list_of(batch, batch->count, state_at); }

static PyObject *get_special(NewMessages *batch, void *Py_UNUSED(closure)) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t n = 0; list != NULL && n < batch->count; n++) {
        if (!batch->messages[n].is_special) continue;
        PyObject *number = PyLong_FromSsize_t(n);
        if (number == NULL || PyList_Append(list, number) < 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

static PyObject *get_stored(NewMessages *batch, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(batch->stored); }

static PyObject *get_largest(NewMessages *batch, void *Py_UNUSED(closure)) {
    int64_t largest = 0;
    for (Py_ssize_t n = 0; n < batch->stored; n++)
        if (batch->messages[n].size > largest) largest = batch->messages[n].size;
    return PyLong_FromLongLong(largest);
}

static PyObject *get_end_offset(NewMessages *batch, void *Py_UNUSED(closure)) {
    if (batch->stored == 0) {
        PyErr_SetString(PyExc_IndexError, "no message was stored");
        return NULL;
    }
    const Message *last = &batch->messages[batch->stored - 1];
    return PyLong_FromLongLong(last->physical_offset + last->size);
}

/* number, stop -> physical offset of the first, end offset of the last of them; both are stored */
static PyObject *batch_bounds(NewMessages *batch, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t from, to;
    if (count != 2 || !as_stretch(batch, args[0], args[1], batch->stored, &from, &to) || from == to)
        return wrong_arguments("NewMessages.bounds");
    const Message *last = &batch->messages[to - 1];
    return Py_BuildValue("(LL)", (long long)batch->messages[from].physical_offset,
                         (long long)(last->physical_offset + last->size));
}

static Py_ssize_t length_of(PyObject *batch) { return ((NewMessages *)batch)->count; }

static PyGetSetDef attributes[] = {
    {"end_offset", (getter)get_end_offset, NULL, NULL, NULL}, {"largest", (getter)get_largest, NULL, NULL, NULL},
    {"places", (getter)get_places, NULL, NULL, NULL},         {"special", (getter)get_special, NULL, NULL, NULL},
    {"states", (getter)get_states, NULL, NULL, NULL},         {"stored", (getter)get_stored, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))batch_add, METH_FASTCALL, NULL},
    {"bounds", (PyCFunction)(void (*)(void))batch_bounds, METH_FASTCALL, NULL},
    {"cut", (PyCFunction)batch_cut, METH_O, NULL},
    {"code", (PyCFunction)batch_code, METH_O, NULL},
    {"group_size", (PyCFunction)batch_group_size, METH_O, NULL},
    {"keyed", (PyCFunction)(void (*)(void))batch_keyed, METH_FASTCALL, NULL},
    {"place", (PyCFunction)(void (*)(void))batch_place, METH_FASTCALL, NULL},
    {"properties", (PyCFunction)batch_properties, METH_O, NULL},
    {"properties_for", (PyCFunction)batch_properties_for, METH_O, NULL},
    {"set_code", (PyCFunction)(void (*)(void))batch_set_code, METH_FASTCALL, NULL},
    {"sys_flag", (PyCFunction)batch_sys_flag, METH_O, NULL},
    {"tags", (PyCFunction)batch_tags, METH_O, NULL},
    {"timestamp", (PyCFunction)batch_timestamp, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = length_of};

PyTypeObject new_messages_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "downrange._steps.NewMessages",
    .tp_basicsize = sizeof(NewMessages),
    .tp_new = new_batch,
    .tp_dealloc = (destructor)free_batch,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_as_sequence = &as_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

int add_new_messages(PyObject *module) {
    n_body = PyUnicode_InternFromString("body");
    n_properties = PyUnicode_InternFromString("properties");
    n_born_timestamp = PyUnicode_InternFromString("born_timestamp");
    n_born_host = PyUnicode_InternFromString("born_host");
    n_store_host = PyUnicode_InternFromString("store_host");
    n_flag = PyUnicode_InternFromString("flag");
    n_sys_flag = PyUnicode_InternFromString("sys_flag");
    n_reconsume_times = PyUnicode_InternFromString("reconsume_times");
    n_prepared = PyUnicode_InternFromString("prepared_transaction_offset");
    return n_prepared != NULL && PyModule_AddType(module, &new_messages_type) == 0;
}
