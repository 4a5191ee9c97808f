/* Replies to sends: protocol/bodies/plain_send.py, SendReply.encode. */
#include "runs.h"

#define ONEWAY 2
#define NUMBERS 128 /* more than the prefix, the fixed part and all numbers of a reply take */

static byte *put_decimal(byte *at, int64_t value) {
    byte digits[20];
    int count = 0;
    uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
    do digits[count++] = (byte)('0' + rest % 10); while (rest /= 10);
    if (value < 0) *at++ = '-';
    while (count > 0) *at++ = digits[--count];
    return at;
}

static byte *put_decimal_with_length(byte *at, int64_t value) {
    byte *end = put_decimal(at + 4, value);
    put32(at, (uint32_t)(end - at - 4));
    return end;
}

static byte *put_place(byte *at, uint64_t value) {
    for (int shift = 60; shift >= 0; shift -= 4) *at++ = (byte)"0123456789ABCDEF"[value >> shift & 15];
    return at;
}

/* The bytes around the numbers; how many they are, or -1 when they are not so many pieces. */
static Py_ssize_t measure(PyObject *pieces, Py_ssize_t expected) {
    Py_ssize_t size = 0;
    if (!PyTuple_CheckExact(pieces) || PyTuple_GET_SIZE(pieces) != expected) return -1;
    for (Py_ssize_t n = 0; n < expected; n++) {
        PyObject *piece = PyTuple_GET_ITEM(pieces, n);
        if (!PyBytes_CheckExact(piece) || (size += PyBytes_GET_SIZE(piece)) > 1 << 20) return -1;
    }
    return size;
}

typedef struct {
    int64_t kind, opaque, flag, queue_id, physical_offset, queue_offset;
} Answer;

static int take_answer(PyObject *answer, Answer *taken) {
    if (!PyTuple_CheckExact(answer) || PyTuple_GET_SIZE(answer) != 3) return 0;
    PyObject *frame = PyTuple_GET_ITEM(answer, 0), *sent = PyTuple_GET_ITEM(answer, 1);
    PyObject *place = PyTuple_GET_ITEM(answer, 2);
    return PyTuple_CheckExact(frame) && PyTuple_GET_SIZE(frame) == 3 && PyTuple_CheckExact(sent)
        && PyTuple_GET_SIZE(sent) == 9 && PyTuple_CheckExact(place) && PyTuple_GET_SIZE(place) == 3
        && as_number(PyTuple_GET_ITEM(frame, 0), 0, 255, &taken->kind)
        && as_int32(PyTuple_GET_ITEM(sent, 0), &taken->opaque) && as_int32(PyTuple_GET_ITEM(sent, 1), &taken->flag)
        && as_number(PyTuple_GET_ITEM(sent, 3), 0, INT32_MAX, &taken->queue_id)
        && as_number(PyTuple_GET_ITEM(place, 0), 0, INT64_MAX, &taken->physical_offset)
        && as_number(PyTuple_GET_ITEM(place, 2), 0, INT64_MAX, &taken->queue_offset);
}

/* JSON header: what stands around place, queue id, queue offset and opaque.
   Binary header: code to version; flag and remark; what stands around place, queue id and queue offset. */
static byte *put_reply(byte *frame, const Answer *answer, PyObject *json, PyObject *binary) {
    byte *header = frame + 8, *at = header;
    if (answer->kind == 1) {
        at = put_object(at, PyTuple_GET_ITEM(binary, 0));
        at = put32(at, (uint32_t)answer->opaque);
        at = put_object(at, PyTuple_GET_ITEM(binary, 1));
        byte *ext = at + 4;
        at = put_place(put_object(ext, PyTuple_GET_ITEM(binary, 2)), (uint64_t)answer->physical_offset);
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 3)), answer->queue_id);
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 4)), answer->queue_offset);
        at = put_object(at, PyTuple_GET_ITEM(binary, 5));
        put32(ext - 4, (uint32_t)(at - ext));
    } else {
        at = put_place(put_object(at, PyTuple_GET_ITEM(json, 0)), (uint64_t)answer->physical_offset);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 1)), answer->queue_id);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 2)), answer->queue_offset);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 3)), answer->opaque);
        at = put_object(at, PyTuple_GET_ITEM(json, 4));
    }
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size), (answer->kind == 1 ? 1u << 24 : 0) | size);
    return at;
}

/* JSON pieces, binary pieces, answers -> frames */
PyObject *encode_replies(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(args[2])) return refuse();
    Py_ssize_t json_size = measure(args[0], 5), binary_size = measure(args[1], 6);
    if (json_size < 0 || binary_size < 0) return refuse();
    Py_ssize_t most = (json_size > binary_size ? json_size : binary_size) + NUMBERS;
    Py_ssize_t length = PyList_GET_SIZE(args[2]);
    if (length > PY_SSIZE_T_MAX / 2 / most) return refuse();
    PyObject *result = PyBytes_FromStringAndSize(NULL, length * most);
    if (result == NULL) return NULL;
    byte *start = (byte *)PyBytes_AS_STRING(result), *at = start;
    for (Py_ssize_t n = 0; n < length; n++) {
        Answer answer;
        if (!take_answer(PyList_GET_ITEM(args[2], n), &answer)) {
            Py_DECREF(result);
            return refuse();
        }
        if (!(answer.flag & ONEWAY)) at = put_reply(at, &answer, args[0], args[1]);
    }
    if (_PyBytes_Resize(&result, at - start) < 0) return NULL;
    return result;
}
