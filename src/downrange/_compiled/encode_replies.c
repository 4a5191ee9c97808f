/* Replies to sends: protocol/bodies/plain_send.py, SendReply.encode. */
#include "run.h"

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

/* JSON pieces, binary pieces, digits of the host in an id, run -> frames */
PyObject *encode_answers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t id_size;
    Run *run = count == 4 ? as_run(args[3]) : NULL;
    if (run == NULL || !has_places(run) || !as_number(args[2], 0, 64, &id_size)) return refuse();
    Py_ssize_t json_size = measure(args[0], 5), binary_size = measure(args[1], 6);
    if (json_size < 0 || binary_size < 0 || !has_room_for(args[0], 0, 0, id_size)
        || !has_room_for(args[1], 2, 4, id_size))
        return refuse();
    Py_ssize_t most = (json_size > binary_size ? json_size : binary_size) + NUMBERS;
    if (run->requests > PY_SSIZE_T_MAX / 4 / most || run->count > PY_SSIZE_T_MAX / 4 / 128) return refuse();
    PyObject *result = PyBytes_FromStringAndSize(NULL, run->requests * most + run->count * (id_size + 17));
    if (result == NULL) return NULL;
    byte *start = (byte *)PyBytes_AS_STRING(result), *at = start;
    const Message *first = run->messages;
    for (const Sent *sent = run->sends; sent < run->sends + run->requests; sent++) {
        if (!(sent->flag & ONEWAY)) at = put_reply(at, sent, first, id_size, args[0], args[1]);
        first += sent->count;
    }
    if (_PyBytes_Resize(&result, at - start) < 0) return NULL;
    return result;
}
