/* The reply to a pull with its records: encode_pull of broker/pull_reply.py. */
#include "steps.h"

#define NUMBERS 160 /* more than the prefix, the fixed part and all numbers of a reply take */

int open_backlog(PyObject *object, Backlog *backlog) {
    if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 4) goto wrong;
    PyObject *entries = PyTuple_GET_ITEM(object, 0);
    if (!PyBytes_CheckExact(entries) || PyBytes_GET_SIZE(entries) < ENTRY_SIZE
        || PyBytes_GET_SIZE(entries) % ENTRY_SIZE
        || !as_number(PyTuple_GET_ITEM(object, 2), 0, INT64_MAX, &backlog->start)
        || !as_number(PyTuple_GET_ITEM(object, 3), 0, INT64_MAX, &backlog->readable))
        goto wrong;
    backlog->entries = (const byte *)PyBytes_AS_STRING(entries);
    backlog->count = PyBytes_GET_SIZE(entries) / ENTRY_SIZE;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(object, 1), &backlog->log, PyBUF_SIMPLE) < 0) return 0;
    if (backlog->readable <= backlog->log.len) return 1;
    PyBuffer_Release(&backlog->log);
wrong:
    PyErr_SetString(PyExc_TypeError, "a backlog is (entries, view of a file, its start, readable bytes of the view)");
    return 0;
}

int lies_within(const Backlog *backlog, int64_t offset, int64_t size) {
    return size > 0 && size <= backlog->readable && offset >= backlog->start
           && offset - backlog->start <= backlog->readable - size;
}

/* How many bytes the records have, if they lie within the file, each behind the one before, and are at most so many;
   else -1. */
static int64_t size_of_records(const Backlog *backlog, int64_t most) {
    int64_t bytes = 0, free_from = backlog->start;
    for (Py_ssize_t n = 0; n < backlog->count; n++) {
        const byte *entry = backlog->entries + n * ENTRY_SIZE;
        int64_t offset = get64(entry), size = (int32_t)get32(entry + 8);
        if (!lies_within(backlog, offset, size) || offset < free_from) return -1;
        free_from = offset + size;
        if ((bytes += size) > most) return -1;
    }
    return bytes;
}

/* Records next to each other are copied in one go. Everything was looked at by size_of_records. */
static byte *copy_records(byte *to, const Backlog *backlog) {
    const byte *log = backlog->log.buf;
    int64_t from = 0, upto = 0;
    for (Py_ssize_t n = 0; n < backlog->count; n++) {
        const byte *entry = backlog->entries + n * ENTRY_SIZE;
        int64_t at = get64(entry) - backlog->start;
        if (at != upto) {
            to = put_bytes(to, log + from, upto - from);
            from = at;
        }
        upto = at + (int32_t)get32(entry + 8);
    }
    return put_bytes(to, log + from, upto - from);
}

byte *copy_backlog(byte *to, const Backlog *backlog, int64_t most, int64_t *copied) {
    *copied = size_of_records(backlog, most);
    return *copied < 0 ? NULL : copy_records(to, backlog);
}

/* JSON header: what stands around the four numbers and the opaque.
   Binary header: code to version; flag and remark; what stands around the four numbers. */
static byte *put_head(byte *frame, int is_binary, int64_t opaque, const int64_t *numbers, PyObject *pieces,
                      int64_t body_size) {
    byte *header = frame + 8, *at = header;
    if (is_binary) {
        at = put_object(put32(put_object(at, PyTuple_GET_ITEM(pieces, 0)), (uint32_t)opaque),
                        PyTuple_GET_ITEM(pieces, 1));
        byte *ext = at + 4;
        at = ext;
        for (int n = 0; n < 4; n++) {
            at = put_object(at, PyTuple_GET_ITEM(pieces, 2 + n));
            at = put_decimal_with_length(at, numbers[n]);
        }
        at = put_object(at, PyTuple_GET_ITEM(pieces, 6));
        put32(ext - 4, (uint32_t)(at - ext));
    } else {
        for (int n = 0; n < 4; n++) at = put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, n)), numbers[n]);
        at = put_object(put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, 4)), opaque), PyTuple_GET_ITEM(pieces, 5));
    }
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size + (uint32_t)body_size), (is_binary ? 1u << 24 : 0) | size);
    return at;
}

/* pieces, kind, opaque, numbers, records, bytes of records -> frame; None for records in several files, or too many bytes
   to be copied */
PyObject *encode_pull(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t kind, opaque, numbers[4], size;
    Backlog backlog;
    byte head[1024];
    if (count != 6 || !as_number(args[1], 0, 1, &kind) || !as_int32(args[2], &opaque)
        || !PyTuple_CheckExact(args[3]) || PyTuple_GET_SIZE(args[3]) != 4
        || !as_number(args[5], 0, INT64_MAX, &size))
        goto wrong;
    for (int n = 0; n < 4; n++)
        if (!as_number(PyTuple_GET_ITEM(args[3], n), INT64_MIN, INT64_MAX, &numbers[n])) goto wrong;
    Py_ssize_t around = measure(args[0], kind ? 7 : 6);
    if (around < 0 || around + NUMBERS > (Py_ssize_t)sizeof head) goto wrong;
    if (PyList_CheckExact(args[4]) || size > COPY_BELOW) Py_RETURN_NONE;
    if (!open_backlog(args[4], &backlog)) return NULL;
    PyObject *frame = NULL;
    if (size_of_records(&backlog, size) == size) {
        Py_ssize_t head_size = put_head(head, (int)kind, opaque, numbers, args[0], size) - head;
        frame = PyBytes_FromStringAndSize(NULL, head_size + (Py_ssize_t)size);
        if (frame != NULL) copy_records(put_bytes((byte *)PyBytes_AS_STRING(frame), head, head_size), &backlog);
    }
    PyBuffer_Release(&backlog.log);
    return frame != NULL ? frame : refuse();
wrong:
    PyErr_SetString(PyExc_TypeError, "encode_pull(pieces, kind, opaque, four numbers, records, bytes of records)");
    return NULL;
}
