/* The table of leases: hold_leases and end_leases of broker/pop/leases.py. */
#include "steps.h"

#define DUE_ITEMS 3 /* when, number, lease */

static PyObject *n_key, *n_held, *n_visible_at, *n_bit_count;

/* The key of a lease as a new reference; NULL with an exception. */
static PyObject *key_of(PyObject *lease) {
    PyObject *key = PyObject_GetAttr(lease, n_key);
    if (key == NULL || (PyTuple_Check(key) && PyTuple_GET_SIZE(key) == 5)) return key;
    Py_DECREF(key);
    PyErr_SetString(PyExc_TypeError, "the key of a lease is a tuple of five");
    return NULL;
}

/* How many bits an int has; -1 with an exception. */
static int64_t count_bits(PyObject *bits) {
    int64_t number = -1;
    if (as_number(bits, 0, INT64_MAX, &number)) return __builtin_popcountll((uint64_t)number);
    PyObject *count = PyObject_CallMethodNoArgs(bits, n_bit_count);
    if (count != NULL && !as_number(count, 0, INT64_MAX, &number)) PyErr_SetString(PyExc_TypeError, "bits are no int");
    Py_XDECREF(count);
    return number;
}

/* Add to the number of messages that are held of the queue of a lease; 0 with an exception. */
static int count_in_flight(PyObject *in_flight, PyObject *key, int64_t more) {
    int64_t before = 0;
    PyObject *queue = PyTuple_GetSlice(key, 0, 3), *known = queue == NULL ? NULL : PyDict_GetItemWithError(in_flight, queue);
    int is_good = queue != NULL && !PyErr_Occurred();
    if (is_good && known != NULL && !as_number(known, 0, INT64_MAX / 2, &before)) {
        PyErr_SetString(PyExc_TypeError, "in_flight has numbers");
        is_good = 0;
    }
    if (is_good && before + more > 0) {
        PyObject *now = PyLong_FromLongLong(before + more);
        is_good = now != NULL && PyDict_SetItem(in_flight, queue, now) == 0;
        Py_XDECREF(now);
    } else if (is_good && known != NULL) is_good = PyDict_DelItem(in_flight, queue) == 0;
    Py_XDECREF(queue);
    return is_good;
}

/* Whether an entry of the heap comes before another; -1 with an exception. */
static int is_before(PyObject *one, PyObject *other) {
    int64_t first, second;
    if (!PyTuple_CheckExact(one) || !PyTuple_CheckExact(other) || PyTuple_GET_SIZE(one) != DUE_ITEMS || PyTuple_GET_SIZE(other) != DUE_ITEMS)
        return wrong_arguments("hold_leases"), -1;
    for (int n = 0; n < 2; n++) {
        if (!as_number(PyTuple_GET_ITEM(one, n), INT64_MIN, INT64_MAX, &first)
            || !as_number(PyTuple_GET_ITEM(other, n), INT64_MIN, INT64_MAX, &second))
            return PyObject_RichCompareBool(one, other, Py_LT);
        if (first != second) return first < second;
    }
    return 0;
}

/* heapq.heappush; 0 with an exception. */
static int push_due(PyObject *due, PyObject *when, int64_t number, PyObject *lease) {
    PyObject *entry = Py_BuildValue("(OLO)", when, (long long)number, lease);
    int is_good = entry != NULL && PyList_Append(due, entry) == 0;
    Py_XDECREF(entry);
    for (Py_ssize_t at = PyList_GET_SIZE(due) - 1; is_good && at > 0;) {
        Py_ssize_t above = (at - 1) / 2;
        PyObject *parent = PyList_GET_ITEM(due, above), *child = PyList_GET_ITEM(due, at);
        int must_swap = is_before(child, parent);
        if (must_swap < 0) return 0;
        if (!must_swap) break;
        PyList_SET_ITEM(due, above, child), PyList_SET_ITEM(due, at, parent);
        at = above;
    }
    return is_good;
}

static int hold_lease(PyObject *table, PyObject *in_flight, PyObject *due, int64_t number, PyObject *lease) {
    PyObject *key = key_of(lease), *held = PyObject_GetAttr(lease, n_held), *when = PyObject_GetAttr(lease, n_visible_at);
    int64_t count = key == NULL || held == NULL || when == NULL ? -1 : count_bits(held);
    int is_good = count >= 0 && PyDict_SetItem(table, key, lease) == 0 && count_in_flight(in_flight, key, count)
        && push_due(due, when, number, lease);
    Py_XDECREF(key);
    Py_XDECREF(held);
    Py_XDECREF(when);
    return is_good;
}

/* table, in_flight, due, number, leases -> the next number */
PyObject *hold_leases(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t number;
    if (count != 5 || !PyDict_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) || !PyList_CheckExact(args[2])
        || !as_number(args[3], 0, INT64_MAX / 2, &number) || !PyList_CheckExact(args[4]))
        return wrong_arguments("hold_leases");
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[4]); n++)
        if (!hold_lease(args[0], args[1], args[2], number++, PyList_GET_ITEM(args[4], n))) return NULL;
    return PyLong_FromLongLong(number);
}

/* Take bits from what a lease holds: whether it holds nothing any more. -1 with an exception. */
static int end_lease(PyObject *table, PyObject *in_flight, PyObject *lease, PyObject *bits) {
    PyObject *key = key_of(lease), *held = PyObject_GetAttr(lease, n_held);
    PyObject *ended = key == NULL || held == NULL ? NULL : PyNumber_And(held, bits);
    PyObject *left = ended == NULL ? NULL : PyNumber_Subtract(held, ended);
    int is_over = left == NULL || PyObject_SetAttr(lease, n_held, left) < 0 ? -1 : 0;
    int64_t count = is_over < 0 ? -1 : count_bits(ended);
    PyObject *known = count > 0 ? PyDict_GetItemWithError(table, key) : NULL;
    if (count < 0 || PyErr_Occurred()) is_over = -1;
    else if (known == lease) {
        is_over = count_in_flight(in_flight, key, -count) ? PyObject_Not(left) : -1;
        if (is_over == 1 && PyDict_DelItem(table, key) < 0) is_over = -1;
    }
    Py_XDECREF(key);
    Py_XDECREF(held);
    Py_XDECREF(ended);
    Py_XDECREF(left);
    return is_over;
}

/* table, in_flight, list of (lease, bits) -> how many leases are over now */
PyObject *end_leases(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long over = 0;
    if (count != 3 || !PyDict_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) || !PyList_CheckExact(args[2]))
        return wrong_arguments("end_leases");
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[2]); n++) {
        PyObject *pair = PyList_GET_ITEM(args[2], n);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyLong_CheckExact(PyTuple_GET_ITEM(pair, 1)))
            return wrong_arguments("end_leases");
        int is_over = end_lease(args[0], args[1], PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
        if (is_over < 0) return NULL;
        over += is_over;
    }
    return PyLong_FromLong(over);
}

int make_table_names(void) {
    n_key = PyUnicode_InternFromString("key");
    n_held = PyUnicode_InternFromString("held");
    n_visible_at = PyUnicode_InternFromString("visible_at");
    n_bit_count = PyUnicode_InternFromString("bit_count");
    return n_key && n_held && n_visible_at && n_bit_count;
}
