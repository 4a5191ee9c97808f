/* The reply to a pull with its records: PullReplyHead.encode of protocol/bodies/plain_pull.py before
   records_of of store/queue/backlog.py. */
#include "steps.h"

#define COPY_BELOW (64 * 1024) /* records that are more than this go out as they lie in the log, if they can */
#define NUMBERS 160 /* more than the prefix, the fixed part and all numbers of a reply take */

int open_backlog(PyObject *object, Backlog *backlog) {
    if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 5) return 0;
    PyObject *entries = PyTuple_GET_ITEM(object, 0);
    if (!PyBytes_CheckExact(entries) || PyBytes_GET_SIZE(entries) < ENTRY_SIZE
        || PyBytes_GET_SIZE(entries) % ENTRY_SIZE
        || !as_number(PyTuple_GET_ITEM(object, 2), 0, INT64_MAX, &backlog->start)
        || !as_number(PyTuple_GET_ITEM(object, 3), 0, INT64_MAX, &backlog->readable)
        || !as_number(PyTuple_GET_ITEM(object, 4), 0, INT64_MAX, &backlog->most_bytes))
        return 0;
    backlog->entries = (const byte *)PyBytes_AS_STRING(entries);
    backlog->count = PyBytes_GET_SIZE(entries) / ENTRY_SIZE;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(object, 1), &backlog->log, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (backlog->readable <= backlog->log.len) return 1;
    PyBuffer_Release(&backlog->log);
    return 0;
}

/* How many bytes the records have; -1 unless all of them lie within the file, each behind the one before, and they
   are few enough. */
static int64_t measure_records(const Backlog *backlog) {
    int64_t bytes = 0, free_from = 0;
    for (Py_ssize_t n = 0; n < backlog->count; n++) {
        const byte *entry = backlog->entries + n * ENTRY_SIZE;
        int64_t offset = get64(entry), size = (int32_t)get32(entry + 8);
        if (size <= 0 || size > backlog->readable || offset < backlog->start) return -1;
        int64_t at = offset - backlog->start;
        if (at < free_from || at > backlog->readable - size) return -1;
        free_from = at + size;
        if ((bytes += size) > backlog->most_bytes || bytes > COPY_BELOW) return -1;
    }
    return bytes;
}

/* Records next to each other are copied in one go. Everything was looked at by measure_records. */
static void copy_records(byte *to, const Backlog *backlog) {
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
    put_bytes(to, log + from, upto - from);
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

/* pieces, kind, opaque, numbers, (entries, log, start, readable, most bytes) -> frame, bytes of records */
PyObject *encode_pull(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t kind, opaque, numbers[4];
    Backlog backlog;
    if (count != 5 || !as_number(args[1], 0, 1, &kind) || !as_int32(args[2], &opaque)) return refuse();
    byte head[1024];
    Py_ssize_t around = measure(args[0], kind ? 7 : 6);
    if (around < 0 || around + NUMBERS > (Py_ssize_t)sizeof head
        || !PyTuple_CheckExact(args[3]) || PyTuple_GET_SIZE(args[3]) != 4)
        return refuse();
    for (int n = 0; n < 4; n++)
        if (!as_number(PyTuple_GET_ITEM(args[3], n), INT64_MIN, INT64_MAX, &numbers[n])) return refuse();
    if (!open_backlog(args[4], &backlog)) return refuse();
    int64_t size = measure_records(&backlog);
    PyObject *result = NULL;
    if (size >= 0) {
        Py_ssize_t head_size = put_head(head, (int)kind, opaque, numbers, args[0], size) - head;
        PyObject *frame = PyBytes_FromStringAndSize(NULL, head_size + (Py_ssize_t)size);
        if (frame != NULL) {
            copy_records(put_bytes((byte *)PyBytes_AS_STRING(frame), head, head_size), &backlog);
            result = Py_BuildValue("NL", frame, (long long)size);
        }
    }
    PyBuffer_Release(&backlog.log);
    return result != NULL ? result : refuse();
}
