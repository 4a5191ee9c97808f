/* A chunk into frames: protocol/framing.py, FrameDecoder.frames. */
#include "runs.h"

/* data, most that the length may say, most that the header's length may say -> frames, where the first incomplete one
   begins; None when a length breaks a rule */
PyObject *cut_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t max_length, max_header;
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !as_number(args[1], 0, INT32_MAX, &max_length)
        || !as_number(args[2], 0, INT32_MAX, &max_header))
        return refuse();
    const byte *start = (const byte *)PyBytes_AS_STRING(args[0]), *at = start, *end = at + PyBytes_GET_SIZE(args[0]);
    PyObject *frames = PyList_New(0);
    if (frames == NULL) return NULL;
    while (end - at >= 8) {
        int64_t length = (int32_t)get32(at), header = get32(at + 4) & 0xFFFFFF;
        if (length > max_length || header > length - 4 || header > max_header) {
            Py_DECREF(frames);
            return refuse();
        }
        if (length > end - at - 4) break;
        PyObject *frame = PyTuple_New(3);
        int is_added = frame != NULL;
        if (frame != NULL) {
            const char *bytes = (const char *)at + 8;
            PyTuple_SET_ITEM(frame, 0, PyLong_FromLong(at[4]));
            PyTuple_SET_ITEM(frame, 1, PyBytes_FromStringAndSize(bytes, (Py_ssize_t)header));
            PyTuple_SET_ITEM(frame, 2, PyBytes_FromStringAndSize(bytes + header, (Py_ssize_t)(length - 4 - header)));
            for (int n = 0; n < 3; n++) is_added = is_added && PyTuple_GET_ITEM(frame, n) != NULL;
        }
        is_added = is_added && PyList_Append(frames, frame) == 0;
        Py_XDECREF(frame);
        if (!is_added) {
            Py_DECREF(frames);
            return NULL;
        }
        at += 4 + length;
    }
    return Py_BuildValue("(Nn)", frames, (Py_ssize_t)(at - start));
}
