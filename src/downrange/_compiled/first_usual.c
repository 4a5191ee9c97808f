/* A function that asks a compiled step first, and Python where that returns None: accelerated_if_usual of compiled.py. */
#include "steps.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *step, *python;
    vectorcallfunc call;
} FirstUsual;

static PyObject *call_either(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    const FirstUsual *either = (FirstUsual *)self;
    PyObject *result = PyObject_Vectorcall(either->step, args, count, names);
    if (result != Py_None) return result;
    Py_DECREF(result);
    return PyObject_Vectorcall(either->python, args, count, names);
}

static void drop_either(PyObject *self) {
    FirstUsual *either = (FirstUsual *)self;
    Py_XDECREF(either->step), Py_XDECREF(either->python);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef members[] = {
    {"__wrapped__", T_OBJECT, offsetof(FirstUsual, python), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject first_usual_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "downrange._steps.FirstUsual",
    .tp_basicsize = sizeof(FirstUsual),
    .tp_dealloc = drop_either,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(FirstUsual, call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_members = members,
};

/* first_usual(step, python) -> a function */
PyObject *first_usual(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyCallable_Check(args[0]) || !PyCallable_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "first_usual: wrong arguments");
    if (PyType_Ready(&first_usual_type) < 0) return NULL;
    FirstUsual *either = PyObject_New(FirstUsual, &first_usual_type);
    if (either == NULL) return NULL;
    either->step = Py_NewRef(args[0]), either->python = Py_NewRef(args[1]), either->call = call_either;
    return (PyObject *)either;
}
