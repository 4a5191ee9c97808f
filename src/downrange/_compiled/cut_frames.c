/* A chunk into frames: protocol/framing.py, FrameDecoder.frames. */
#include "steps.h"

/* Where the first incomplete frame begins; -1 when a length breaks a rule. */
Py_ssize_t whole_frames(const byte *start, Py_ssize_t size, int64_t max_length, int64_t max_header) {
    const byte *at = start, *end = start + size;
    while (end - at >= 8) {
        int64_t length = (int32_t)get32(at), header = get32(at + 4) & 0xFFFFFF;
        if (length > max_length || header > length - 4 || header > max_header) return -1;
        if (length > end - at - 4) break;
        at += 4 + length;
    }
    return at - start;
}

/* Adds frames that are whole; how many, or -1 with an exception. */
Py_ssize_t add_frames(PyObject *frames, const byte *at, Py_ssize_t size) {
    Py_ssize_t count = 0;
    for (const byte *end = at + size; at < end; count++) {
        Py_ssize_t length = (Py_ssize_t)get32(at), header = get32(at + 4) & 0xFFFFFF;
        PyObject *frame = PyTuple_New(3);
        int is_added = frame != NULL;
        if (frame != NULL) {
            const char *bytes = (const char *)at + 8;
            PyTuple_SET_ITEM(frame, 0, PyLong_FromLong(at[4]));
            PyTuple_SET_ITEM(frame, 1, PyBytes_FromStringAndSize(bytes, header));
            PyTuple_SET_ITEM(frame, 2, PyBytes_FromStringAndSize(bytes + header, length - 4 - header));
            for (int n = 0; n < 3; n++) is_added = is_added && PyTuple_GET_ITEM(frame, n) != NULL;
        }
        is_added = is_added && PyList_Append(frames, frame) == 0;
        Py_XDECREF(frame);
        if (!is_added) return -1;
        at += 4 + length;
    }
    return count;
}

/* data, most that the length may say, most that the header's length may say -> frames, where the first incomplete one
   begins; None when a length breaks a rule */
PyObject *cut_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t max_length, max_header;
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !as_number(args[1], 0, INT32_MAX, &max_length)
        || !as_number(args[2], 0, INT32_MAX, &max_header))
        return refuse();
    const byte *start = (const byte *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t end = whole_frames(start, PyBytes_GET_SIZE(args[0]), max_length, max_header);
    if (end < 0) return refuse();
    PyObject *frames = PyList_New(0);
    if (frames == NULL) return NULL;
    if (add_frames(frames, start, end) < 0) {
        Py_DECREF(frames);
        return NULL;
    }
    return Py_BuildValue("(Nn)", frames, end);
}
