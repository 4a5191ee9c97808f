/* The class SendReplies: protocol/bodies/send_replies.py. */
#include "new_messages.h"
#include "send_replies.h"

PyObject *n_json_pieces, *n_binary_pieces, *n_id_size;

enum { ALL, AT_ONCE, WHEN_SAFE }; /* the values of `which` in Python */

#define NUMBERS 128 /* more than the prefix, the fixed part and all numbers of a reply take */

static byte *put_place(byte *at, uint64_t value) {
    for (int shift = 60; shift >= 0; shift -= 4) *at++ = (byte)"0123456789ABCDEF"[value >> shift & 15];
    return at;
}

/* Offset ids, one for each message: the store's host in `id_size` digits that stand before `at` already, and its place. */
static byte *put_ids(byte *at, const Message *message, Py_ssize_t count, Py_ssize_t id_size) {
    const byte *host = at - id_size;
    at = put_place(at, (uint64_t)message->physical_offset);
    for (Py_ssize_t n = 1; n < count; n++) {
        *at++ = ',';
        at = put_place(put_bytes(at, host, id_size), (uint64_t)message[n].physical_offset);
    }
    return at;
}

/* JSON header: what stands around place, queue id, queue offset and opaque.
   Binary header: code to version; flag and remark; what stands around place, queue id and queue offset. */
static byte *put_reply(byte *frame, const Sent *sent, const Message *first, Py_ssize_t id_size, PyObject *json,
                       PyObject *binary) {
    byte *header = frame + 8, *at = header;
    if (sent->kind == 1) {
        at = put_object(at, PyTuple_GET_ITEM(binary, 0));
        at = put32(at, (uint32_t)sent->opaque);
        at = put_object(at, PyTuple_GET_ITEM(binary, 1));
        byte *ext = at + 4, *ids = put_object(ext, PyTuple_GET_ITEM(binary, 2));
        at = put_ids(ids, first, sent->count, id_size);
        put32(ids - id_size - 4, (uint32_t)(at - ids + id_size));
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 3)), sent->queue_id);
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 4)), first->queue_offset);
        at = put_object(at, PyTuple_GET_ITEM(binary, 5));
        put32(ext - 4, (uint32_t)(at - ext));
    } else {
        at = put_object(at, PyTuple_GET_ITEM(json, 0));
        at = put_ids(at, first, sent->count, id_size);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 1)), sent->queue_id);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 2)), first->queue_offset);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 3)), sent->opaque);
        at = put_object(at, PyTuple_GET_ITEM(json, 4));
    }
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size), (sent->kind == 1 ? 1u << 24 : 0) | size);
    return at;
}

/* Does the first piece end with the host, behind `before` bytes? */
static int has_room_for(PyObject *pieces, Py_ssize_t number, Py_ssize_t before, Py_ssize_t id_size) {
    return PyBytes_GET_SIZE(PyTuple_GET_ITEM(pieces, number)) >= before + id_size;
}

Sent *add_sent(SendReplies *replies) {
    if (replies->count == replies->room) {
        Py_ssize_t room = 4 * replies->room + 8;
        Sent *requests = PyMem_Realloc(replies->requests, (size_t)room * sizeof *requests);
        if (requests == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        replies->requests = requests, replies->room = room;
    }
    Sent *sent = &replies->requests[replies->count++];
    memset(sent, 0, sizeof *sent);
    return sent;
}

/* kind, code, opaque, flag, queue id, first, count, waits */
static PyObject *replies_add(SendReplies *replies, PyObject *const *args, Py_ssize_t count) {
    int64_t numbers[7];
    int is_good = count == 8 && PyBool_Check(args[7]);
    for (int n = 0; is_good && n < 7; n++) is_good = as_int32(args[n], &numbers[n]);
    if (!is_good || numbers[4] < 0 || numbers[5] < 0 || numbers[6] < 1) return wrong_arguments("SendReplies.add");
    Sent *sent = add_sent(replies);
    if (sent == NULL) return NULL;
    sent->kind = numbers[0], sent->code = numbers[1], sent->opaque = numbers[2], sent->flag = numbers[3];
    sent->queue_id = numbers[4], sent->first = numbers[5], sent->count = numbers[6], sent->waits = args[7] == Py_True;
    Py_RETURN_NONE;
}

/* code, reply, first, count, waits */
static PyObject *replies_add_ready(SendReplies *replies, PyObject *const *args, Py_ssize_t count) {
    int64_t code, first, messages;
    if (count != 5 || !as_int32(args[0], &code) || !PyBytes_CheckExact(args[1]) || !as_number(args[2], 0, INT32_MAX, &first)
        || !as_number(args[3], 0, INT32_MAX, &messages) || !PyBool_Check(args[4]))
        return wrong_arguments("SendReplies.add_ready");
    Sent *sent = add_sent(replies);
    if (sent == NULL) return NULL;
    sent->code = code, sent->first = first, sent->count = messages, sent->waits = args[4] == Py_True;
    sent->ready = Py_NewRef(args[1]);
    Py_RETURN_NONE;
}

/* The request with this number; NULL with an exception. */
static Sent *request_at(const SendReplies *replies, PyObject *number) {
    int64_t n;
    if (as_number(number, 0, replies->count - 1, &n)) return &replies->requests[n];
    PyErr_Format(PyExc_IndexError, "there is no request %R", number);
    return NULL;
}

/* number, reply */
static PyObject *replies_set_ready(SendReplies *replies, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyBytes_CheckExact(args[1])) return wrong_arguments("SendReplies.set_ready");
    Sent *sent = request_at(replies, args[0]);
    if (sent == NULL) return NULL;
    Py_XSETREF(sent->ready, Py_NewRef(args[1]));
    Py_RETURN_NONE;
}

static PyObject *replies_request(SendReplies *replies, PyObject *number) {
    const Sent *sent = request_at(replies, number);
    if (sent == NULL) return NULL;
    return Py_BuildValue("(LLLLnn)", (long long)sent->kind, (long long)sent->code, (long long)sent->opaque,
                         (long long)sent->flag, sent->first, sent->count);
}

static PyObject *replies_codes(SendReplies *replies, PyObject *Py_UNUSED(unused)) {
    PyObject *codes = PyDict_New();
    for (Py_ssize_t n = 0, next; codes != NULL && n < replies->count; n = next) {
        for (next = n + 1; next < replies->count && replies->requests[next].code == replies->requests[n].code;) next++;
        PyObject *code = PyLong_FromLongLong(replies->requests[n].code);
        PyObject *known = code == NULL ? NULL : PyDict_GetItemWithError(codes, code);
        PyObject *number = PyLong_FromSsize_t((known == NULL ? 0 : PyLong_AsSsize_t(known)) + next - n);
        if (code == NULL || number == NULL || PyErr_Occurred() || PyDict_SetItem(codes, code, number) < 0) Py_CLEAR(codes);
        Py_XDECREF(code);
        Py_XDECREF(number);
    }
    return codes;
}

static PyObject *replies_batches(SendReplies *replies, PyObject *Py_UNUSED(unused)) {
    PyObject *batches = PyList_New(0);
    for (Py_ssize_t n = 0; batches != NULL && n < replies->count; n++) {
        const Sent *sent = &replies->requests[n];
        if (sent->ready != NULL || sent->count < 2) continue;
        PyObject *pair = Py_BuildValue("(nn)", sent->first, sent->count);
        if (pair == NULL || PyList_Append(batches, pair) < 0) Py_CLEAR(batches);
        Py_XDECREF(pair);
    }
    return batches;
}

/* Is this request answered now, with a frame? */
static int is_wanted(const Sent *sent, int64_t which) {
    if (which != ALL && sent->waits != (which == WHEN_SAFE)) return 0;
    return sent->ready != NULL ? PyBytes_GET_SIZE(sent->ready) > 0 : !(sent->flag & ONEWAY);
}

static PyObject *encode_all(const SendReplies *replies, PyObject *json, PyObject *binary, int64_t id_size,
                            const NewMessages *batch, int64_t which) {
    Py_ssize_t json_size = measure(json, 5), binary_size = measure(binary, 6), size = 0, answered = 0;
    if (json_size < 0 || binary_size < 0 || !has_room_for(json, 0, 0, id_size) || !has_room_for(binary, 2, 4, id_size))
        return wrong_arguments("SendReplies.encode");
    Py_ssize_t most = (json_size > binary_size ? json_size : binary_size) + NUMBERS;
    for (Py_ssize_t n = 0; n < replies->count; n++) {
        const Sent *sent = &replies->requests[n];
        if (!is_wanted(sent, which)) continue;
        answered++;
        if (sent->ready == NULL && (sent->first > batch->stored || sent->count > batch->stored - sent->first)) {
            PyErr_SetString(PyExc_ValueError, "SendReplies.encode: a message of a request was not stored");
            return NULL;
        }
        size += sent->ready != NULL ? PyBytes_GET_SIZE(sent->ready) : most + sent->count * (id_size + 17);
    }
    PyObject *frames = PyBytes_FromStringAndSize(NULL, size);
    PyObject *numbers = answered == replies->count ? Py_NewRef(Py_None) : PyList_New(answered);
    if (frames == NULL || numbers == NULL) goto failed;
    byte *start = (byte *)PyBytes_AS_STRING(frames), *at = start;
    answered = 0;
    for (Py_ssize_t n = 0; n < replies->count; n++) {
        const Sent *sent = &replies->requests[n];
        if (!is_wanted(sent, which)) continue;
        at = sent->ready != NULL ? put_object(at, sent->ready)
                                 : put_reply(at, sent, batch->messages + sent->first, id_size, json, binary);
        if (numbers != Py_None) {
            PyObject *number = PyLong_FromSsize_t(n);
            if (number == NULL) goto failed;
            PyList_SET_ITEM(numbers, answered++, number);
        }
    }
    if (_PyBytes_Resize(&frames, at - start) < 0) goto failed;
    return Py_BuildValue("(NN)", frames, numbers);
failed:
    Py_XDECREF(frames);
    Py_XDECREF(numbers);
    return NULL;
}

/* template, messages, which -> frames, the numbers of the requests that they answer or None for all */
static PyObject *replies_encode(SendReplies *replies, PyObject *const *args, Py_ssize_t count) {
    int64_t which, id_size;
    const NewMessages *batch = count == 3 ? as_messages(args[1]) : NULL;
    if (batch == NULL || !as_number(args[2], ALL, WHEN_SAFE, &which)) return wrong_arguments("SendReplies.encode");
    PyObject *json = PyObject_GetAttr(args[0], n_json_pieces), *result = NULL;
    PyObject *binary = PyObject_GetAttr(args[0], n_binary_pieces), *digits = PyObject_GetAttr(args[0], n_id_size);
    if (json != NULL && binary != NULL && digits != NULL)
        result = as_number(digits, 0, 64, &id_size) ? encode_all(replies, json, binary, id_size, batch, which)
                                                    : wrong_arguments("SendReplies.encode");
    Py_XDECREF(json);
    Py_XDECREF(binary);
    Py_XDECREF(digits);
    return result;
}

static PyObject *new_replies(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    if (!PyArg_ParseTuple(args, "") || (keywords != NULL && PyDict_GET_SIZE(keywords) > 0)) return NULL;
    return type->tp_alloc(type, 0);
}

static void free_replies(SendReplies *replies) {
    for (Py_ssize_t n = 0; n < replies->count; n++) Py_XDECREF(replies->requests[n].ready);
    PyMem_Free(replies->requests);
    Py_TYPE(replies)->tp_free(replies);
}

static Py_ssize_t length_of(PyObject *replies) { return ((SendReplies *)replies)->count; }

static PyObject *get_code(SendReplies *replies, void *Py_UNUSED(closure)) {
    int64_t code = replies->count > 0 ? replies->requests[0].code : -1;
    for (Py_ssize_t n = 1; n < replies->count; n++)
        if (replies->requests[n].code != code) code = -1;
    return PyLong_FromLongLong(code);
}

static PyGetSetDef attributes[] = {{"code", (getter)get_code, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))replies_add, METH_FASTCALL, NULL},
    {"add_ready", (PyCFunction)(void (*)(void))replies_add_ready, METH_FASTCALL, NULL},
    {"batches", (PyCFunction)replies_batches, METH_NOARGS, NULL},
    {"codes", (PyCFunction)replies_codes, METH_NOARGS, NULL},
    {"encode", (PyCFunction)(void (*)(void))replies_encode, METH_FASTCALL, NULL},
    {"request", (PyCFunction)replies_request, METH_O, NULL},
    {"set_ready", (PyCFunction)(void (*)(void))replies_set_ready, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = length_of};

PyTypeObject send_replies_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "downrange._steps.SendReplies",
    .tp_basicsize = sizeof(SendReplies),
    .tp_new = new_replies,
    .tp_dealloc = (destructor)free_replies,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_as_sequence = &as_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};
