/* Replies to sends of the load generator: load/replies.py, read_replies. There is nothing that this one leaves to
   its twin, so wrong arguments are an exception. */
#include "steps.h"

#define OPAQUE_DIGITS 9

/* The request that a reply answers, by its place in the ring; -1 when the opaque is not where it usually is. */
static int64_t slot_of(const byte *frame, const byte *stop, Py_ssize_t after, int is_json, int64_t first_opaque) {
    int64_t opaque = 0;
    if (!is_json) {
        if (stop - frame < 17) return -1;
        return (int64_t)(int32_t)get32(frame + 13) - first_opaque;
    }
    if (stop - frame < 8 + OPAQUE_DIGITS + after) return -1;
    for (const byte *at = stop - after - OPAQUE_DIGITS; at < stop - after; at++) {
        if (*at < '0' || *at > '9') return -1;
        opaque = opaque * 10 + (*at - '0');
    }
    return opaque - first_opaque;
}

/* moment, how often it came in a row; 0 when memory ran out */
static int add_run(PyObject *runs, int64_t moment, int64_t times) {
    const int64_t numbers[] = {moment, times};
    for (int n = 0; n < 2; n++) {
        PyObject *number = PyLong_FromLongLong(numbers[n]);
        int is_added = number != NULL && PyList_Append(runs, number) == 0;
        Py_XDECREF(number);
        if (!is_added) return 0;
    }
    return 1;
}

/* is the header JSON, start of a usual header, bytes behind its opaque, opaque of the first request, moments at which
   requests were sent, data, where to begin -> where the first reply begins that is not a usual one, how many stand before
   it, their moments; the requests they answer have no moment any more. */
PyObject *read_replies(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t first_at, after, first_opaque;
    Py_buffer view;
    if (count != 7 || !PyBool_Check(args[0]) || !PyBytes_CheckExact(args[1]) || !as_number(args[2], 0, 1 << 24, &after)
        || !as_int32(args[3], &first_opaque) || !PyBytes_CheckExact(args[5])
        || !as_number(args[6], 0, PyBytes_GET_SIZE(args[5]), &first_at))
        return PyErr_Format(PyExc_TypeError, "read_replies: these are not its arguments");
    if (PyObject_GetBuffer(args[4], &view, PyBUF_WRITABLE) < 0) return NULL;
    int is_json = args[0] == Py_True;
    PyObject *runs = PyList_New(0), *result = NULL;
    int64_t *moments = view.buf, slots = view.len / (Py_ssize_t)sizeof(int64_t), moment = 0, times = 0, answered = 0;
    const byte *data = (const byte *)PyBytes_AS_STRING(args[5]), *at = data + first_at;
    const byte *end = data + PyBytes_GET_SIZE(args[5]), *start = (const byte *)PyBytes_AS_STRING(args[1]);
    Py_ssize_t start_size = PyBytes_GET_SIZE(args[1]);
    if (runs == NULL) goto done;
    if ((uintptr_t)moments % sizeof(int64_t)) {
        PyErr_SetString(PyExc_TypeError, "read_replies: moments are not aligned");
        goto done;
    }
    while (start_size > 0 && end - at >= 8) {
        int64_t length = (int32_t)get32(at);
        if (length < 4 + start_size || length > end - at - 4 || memcmp(at + 8, start, (size_t)start_size)) break;
        const byte *stop = at + 4 + length;
        int64_t slot = slot_of(at, stop, (Py_ssize_t)after, is_json, first_opaque);
        if (slot < 0 || slot >= slots || moments[slot] == 0) break;
        if (moments[slot] != moment) {
            if (times > 0 && !add_run(runs, moment, times)) goto done;
            moment = moments[slot], answered += times, times = 0;
        }
        times++;
        moments[slot] = 0;
        at = stop;
    }
    if (times == 0 || add_run(runs, moment, times))
        result = Py_BuildValue("(nLO)", (Py_ssize_t)(at - data), (long long)(answered + times), runs);
done:
    PyBuffer_Release(&view);
    Py_XDECREF(runs);
    return result;
}
