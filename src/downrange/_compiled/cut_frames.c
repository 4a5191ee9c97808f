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
PyObject *cut_frames(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t max_length, max_header;
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !as_number(args[1], 0, INT32_MAX, &max_length)
        || !as_number(args[2], 0, INT32_MAX, &max_header))
        return wrong_arguments("cut_frames");
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

/* The code of the command with this header; 0 when the header is not written as usual. */
static int read_code(PyObject *frame, int64_t *code) {
    int64_t kind;
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3 || !PyBytes_CheckExact(PyTuple_GET_ITEM(frame, 1))
        || !as_number(PyTuple_GET_ITEM(frame, 0), 0, 1, &kind))
        return 0;
    const byte *at = (const byte *)PyBytes_AS_STRING(PyTuple_GET_ITEM(frame, 1));
    Py_ssize_t size = PyBytes_GET_SIZE(PyTuple_GET_ITEM(frame, 1));
    if (kind == 1) {
        if (size < 2) return 0;
        *code = (int16_t)(at[0] << 8 | at[1]);
        return 1;
    }
    if (size < 10 || memcmp(at, "{\"code\":", 8)) return 0;
    int64_t number = 0;
    Py_ssize_t n = 8;
    for (; n < size && n < 18 && at[n] >= '0' && at[n] <= '9'; n++) number = 10 * number + at[n] - '0';
    *code = number;
    return n > 8 && n < size && at[n] == ',';
}

/* frames, at, families by code -> the family of the frame at `at`, and the first frame behind it that has another one.
   The family is None when the code has none; both are (None, at) when the header is unusual. */
PyObject *next_run(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, code, known = 0;
    PyObject *family = NULL;
    if (count != 3 || !PyList_CheckExact(args[0]) || !as_number(args[1], 0, PyList_GET_SIZE(args[0]) - 1, &at)
        || !PyDict_CheckExact(args[2]))
        return wrong_arguments("next_run");
    for (; at < PyList_GET_SIZE(args[0]); at++) {
        if (!read_code(PyList_GET_ITEM(args[0], at), &code)) break;
        if (family != NULL && code == known) continue;
        PyObject *number = PyLong_FromLongLong(code);
        PyObject *found = number == NULL ? NULL : PyDict_GetItemWithError(args[2], number);
        Py_XDECREF(number);
        if (PyErr_Occurred()) return NULL;
        if (family != NULL && found != family) break;
        if (found == NULL) return Py_BuildValue("(OL)", Py_None, (long long)at + 1);
        family = found, known = code;
    }
    return Py_BuildValue("(OL)", family != NULL ? family : Py_None, (long long)at);
}
