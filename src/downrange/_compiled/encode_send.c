/* The frame of a send: protocol/bodies/send_template.py, SendTemplate.frame. */
#include "steps.h"

#define HEADER_ROOM 16384 /* a header of that many bytes is built here before its size is known */
#define NUMBERS 120       /* more than the five numbers of a header take */

/* Text as JSON has it between quotes, into `to`, which has room for six bytes a character. */
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

/* The numbers are those of a send in their order: queue id, sysFlag, born timestamp, flag. NULL when it does not fit. */
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

/* what stands around the numbers and the properties, opaque, queue id, sysFlag, born timestamp, flag, properties, body,
   most that the frame's length may say -> frame */
PyObject *encode_send(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t opaque, numbers[4], most;
    if (count != 9 || !as_int32(args[1], &opaque) || !PyUnicode_CheckExact(args[6]) || !PyBytes_CheckExact(args[7])
        || !as_number(args[8], 0, INT32_MAX, &most))
        return refuse();
    for (int n = 0; n < 4; n++)
        if (!as_number(args[2 + n], INT64_MIN, INT64_MAX, &numbers[n])) return refuse();
    Py_ssize_t text_size;
    const char *text = PyUnicode_AsUTF8AndSize(args[6], &text_size);
    if (text == NULL) { /* half a character: the twin says so */
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) PyErr_Clear();
        return refuse();
    }
    PyObject *frame = frame_of_send(args[0], numbers, text, text_size, opaque, args[7], most);
    return frame != NULL ? frame : refuse();
}
