/* Replies to sends: protocol/bodies/plain_send.py, SendReply.encode. */
#include "runs.h"

#define ONEWAY 2
#define NUMBERS 128 /* more than the prefix, the fixed part and all numbers of a reply take */

static byte *put_place(byte *at, uint64_t value) {
    for (int shift = 60; shift >= 0; shift -= 4) *at++ = (byte)"0123456789ABCDEF"[value >> shift & 15];
    return at;
}

/* Offset ids, one for each place: the store's host in `id_size` digits that stand before `at` already, and the place. */
static byte *put_ids(byte *at, PyObject *places, Py_ssize_t first, Py_ssize_t count, Py_ssize_t id_size, int64_t *offset) {
    const byte *host = at - id_size;
    for (Py_ssize_t n = first; n < first + count; n++) {
        int64_t physical_offset;
        PyObject *place = PyList_GET_ITEM(places, n);
        if (!PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 3) return NULL;
        if (!as_number(PyTuple_GET_ITEM(place, 0), 0, INT64_MAX, &physical_offset)) return NULL;
        if (n == first && !as_number(PyTuple_GET_ITEM(place, 2), 0, INT64_MAX, offset)) return NULL;
        if (n > first) {
            *at++ = ',';
            at = put_bytes(at, host, id_size);
        }
        at = put_place(at, (uint64_t)physical_offset);
    }
    return at;
}

typedef struct {
    int64_t kind, opaque, flag, queue_id, count;
} Sent;

static int take_sent(PyObject *object, Sent *sent) {
    return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 5
        && as_number(PyTuple_GET_ITEM(object, 0), 0, 255, &sent->kind)
        && as_int32(PyTuple_GET_ITEM(object, 1), &sent->opaque) && as_int32(PyTuple_GET_ITEM(object, 2), &sent->flag)
        && as_number(PyTuple_GET_ITEM(object, 3), 0, INT32_MAX, &sent->queue_id)
        && as_number(PyTuple_GET_ITEM(object, 4), 1, 1 << 16, &sent->count);
}

/* JSON header: what stands around place, queue id, queue offset and opaque.
   Binary header: code to version; flag and remark; what stands around place, queue id and queue offset. */
static byte *put_reply(byte *frame, const Sent *sent, PyObject *places, Py_ssize_t first, Py_ssize_t id_size,
                       PyObject *json, PyObject *binary) {
    byte *header = frame + 8, *at = header;
    int64_t queue_offset;
    if (sent->kind == 1) {
        at = put_object(at, PyTuple_GET_ITEM(binary, 0));
        at = put32(at, (uint32_t)sent->opaque);
        at = put_object(at, PyTuple_GET_ITEM(binary, 1));
        byte *ext = at + 4, *ids = put_object(ext, PyTuple_GET_ITEM(binary, 2));
        at = put_ids(ids, places, first, sent->count, id_size, &queue_offset);
        if (at == NULL) return NULL;
        put32(ids - id_size - 4, (uint32_t)(at - ids + id_size));
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 3)), sent->queue_id);
        at = put_decimal_with_length(put_object(at, PyTuple_GET_ITEM(binary, 4)), queue_offset);
        at = put_object(at, PyTuple_GET_ITEM(binary, 5));
        put32(ext - 4, (uint32_t)(at - ext));
    } else {
        at = put_object(at, PyTuple_GET_ITEM(json, 0));
        at = put_ids(at, places, first, sent->count, id_size, &queue_offset);
        if (at == NULL) return NULL;
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 1)), sent->queue_id);
        at = put_decimal(put_object(at, PyTuple_GET_ITEM(json, 2)), queue_offset);
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

/* JSON pieces, binary pieces, digits of the host in an id, sends, places -> frames */
PyObject *encode_answers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t id_size;
    if (count != 5 || !as_number(args[2], 0, 64, &id_size) || !PyList_CheckExact(args[3]) || !PyList_CheckExact(args[4]))
        return refuse();
    Py_ssize_t json_size = measure(args[0], 5), binary_size = measure(args[1], 6);
    if (json_size < 0 || binary_size < 0 || !has_room_for(args[0], 0, 0, id_size)
        || !has_room_for(args[1], 2, 4, id_size))
        return refuse();
    Py_ssize_t most = (json_size > binary_size ? json_size : binary_size) + NUMBERS, used = 0;
    Py_ssize_t length = PyList_GET_SIZE(args[3]), messages = PyList_GET_SIZE(args[4]);
    if (length > PY_SSIZE_T_MAX / 4 / most || messages > PY_SSIZE_T_MAX / 4 / 128) return refuse();
    PyObject *result = PyBytes_FromStringAndSize(NULL, length * most + messages * (id_size + 17));
    if (result == NULL) return NULL;
    byte *start = (byte *)PyBytes_AS_STRING(result), *at = start;
    for (Py_ssize_t n = 0; n < length; n++) {
        Sent sent;
        int is_good = take_sent(PyList_GET_ITEM(args[3], n), &sent) && sent.count <= messages - used;
        if (is_good && !(sent.flag & ONEWAY)) {
            at = put_reply(at, &sent, args[4], used, id_size, args[0], args[1]);
            is_good = at != NULL;
        }
        if (!is_good) {
            Py_DECREF(result);
            return refuse();
        }
        used += sent.count;
    }
    if (_PyBytes_Resize(&result, at - start) < 0) return NULL;
    return result;
}
