/* The frame of a send: encode_send of protocol/bodies/send_template.py. */
#include "steps.h"

#define HEADER_ROOM 16384 /* the header is built on the stack first, because its size stands in front of it */
#define NUMBERS 120       /* more than the five numbers of a header take */

/* Writes text as it stands between the quotes of JSON to `to`, which has room for six bytes a character. */
static byte *put_escaped(byte *to, const char *at, Py_ssize_t size) {
    for (const char *end = at + size; at < end; at++) {
        byte c = (byte)*at;
        if (c >= ' ' && c != '"' && c != '\\') {
            *to++ = c;
            continue;
        }
        *to++ = '\\';
        switch (c) {
        case '"': case '\\': *to++ = c; break;
        case '\b': *to++ = 'b'; break;
        case '\f': *to++ = 'f'; break;
        case '\n': *to++ = 'n'; break;
        case '\r': *to++ = 'r'; break;
        case '\t': *to++ = 't'; break;
        default:
            to = put_bytes(to, "u00", 3);
            *to++ = (byte)('0' + (c >> 4));
            *to++ = (byte)"0123456789abcdef"[c & 15];
        }
    }
    return to;
}

/* `numbers`: queue id, sysFlag, born timestamp, flag. NULL without an exception when the header or the frame is too large. */
PyObject *frame_of_send(PyObject *pieces, const int64_t *numbers, const char *text, Py_ssize_t text_size, int64_t opaque,
                        PyObject *body, int64_t most) {
    byte header[HEADER_ROOM], *at = header;
    Py_ssize_t pieces_size = measure(pieces, 7), body_size = PyBytes_GET_SIZE(body);
    if (pieces_size < 0 || text_size > HEADER_ROOM / 6 || pieces_size + 6 * text_size + NUMBERS > HEADER_ROOM) return NULL;
    for (int n = 0; n < 4; n++) at = put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, n)), numbers[n]);
    at = put_escaped(put_object(at, PyTuple_GET_ITEM(pieces, 4)), text, text_size);
    at = put_object(put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, 5)), opaque), PyTuple_GET_ITEM(pieces, 6));
    Py_ssize_t size = at - header, length = 4 + size + body_size;
    if (length > most) return NULL;
    PyObject *frame = PyBytes_FromStringAndSize(NULL, 4 + length);
    if (frame == NULL) return NULL;
    at = put32(put32((byte *)PyBytes_AS_STRING(frame), (uint32_t)length), (uint32_t)size); /* the mark of JSON is 0 */
    put_object(put_bytes(at, header, size), body);
    return frame;
}

/* encode_send(pieces, opaque, queue_id, sys_flag, born_timestamp, flag, properties, body, longest) -> frame */
PyObject *encode_send(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t opaque, numbers[4], most;
    if (count != 9 || measure(args[0], 7) < 0 || !PyLong_Check(args[1]) || !PyUnicode_Check(args[6])
        || !PyBytes_CheckExact(args[7]) || !as_number(args[8], 0, INT32_MAX, &most))
        return PyErr_Format(PyExc_TypeError, "encode_send: wrong arguments");
    if (!as_int32(args[1], &opaque) || !PyUnicode_CheckExact(args[6])) return refuse();
    for (int n = 0; n < 4; n++)
        if (!as_number(args[2 + n], INT64_MIN, INT64_MAX, &numbers[n])) return refuse();
    Py_ssize_t text_size;
    const char *text = PyUnicode_AsUTF8AndSize(args[6], &text_size);
    if (text == NULL) { /* half a surrogate pair: Python raises the error */
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) PyErr_Clear();
        return refuse();
    }
    PyObject *frame = frame_of_send(args[0], numbers, text, text_size, opaque, args[7], most);
    return frame != NULL ? frame : refuse();
}
