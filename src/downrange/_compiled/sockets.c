/* All plain TCP connections of a server behind one epoll descriptor; transport/sockets.py says why. There is no Python
 * twin: where this file was not compiled, the event loop's own transports are used.
 *
 * Creating an object may start the garbage collector, which may run any code. So every object that is used afterwards
 * is owned here, and the table is read again. All calls hold the GIL and come from the loop's thread. */
#include "steps.h"
#ifdef __linux__
#include <errno.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* Limits of one `receive`. A few hundred messages are enough to share the cost of a call. With thousands of them the
   first would have left the processor's cache before the last is handled, and one turn of the loop would be long. */
#define MOST_SOCKETS 64
#define MOST_BYTES (1 << 18)
#define ENOUGH_BYTES (1 << 16) /* once so many bytes were received, no further socket is read */

/* One connection; transport/socket_transport.py derives a transport from it. */
typedef struct {
    PyObject_HEAD
    PyObject *requests; /* NULL, or a dict: this end's own requests that wait for a reply */
    int descriptor;     /* -1 after it was closed */
    char is_gathered;   /* whole frames may be returned together with those of other sockets */
    char is_full;       /* the transport holds bytes that the kernel did not take yet */
    char has_queued;    /* the connection holds frames that it did not give to the transport yet */
} Socket;

typedef struct {
    PyObject_HEAD
    int epoll;
    int64_t max_length, max_header; /* of a frame */
    Socket **table;                 /* by descriptor; NULL or owned */
    Py_ssize_t size;
    byte *space;
    /* What epoll_wait returned. Events that `receive` did not get to come first next time: epoll itself is not fair. */
    struct epoll_event events[MOST_SOCKETS];
    int event, count;
} Sockets;

static PyTypeObject *socket_type;

/* How many bytes the kernel took; -1 for an error. */
static ssize_t send_now(const Socket *socket, const byte *at, Py_ssize_t size) {
    ssize_t sent;
    do sent = send(socket->descriptor, at, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : sent;
}

/* data -> how many bytes the kernel took */
static PyObject *socket_send(Socket *self, PyObject *object) {
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) return NULL;
    ssize_t sent = send_now(self, data.buf, data.len);
    PyBuffer_Release(&data);
    return sent < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromSsize_t(sent);
}

static PyObject *socket_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    Socket *self = (Socket *)type->tp_alloc(type, 0);
    if (self != NULL) self->descriptor = -1;
    return (PyObject *)self;
}

static void socket_dealloc(Socket *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->requests);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef socket_methods[] = {
    {"send", (PyCFunction)socket_send, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef socket_members[] = {
    {"requests", T_OBJECT_EX, offsetof(Socket, requests), 0, NULL},
    {"descriptor", T_INT, offsetof(Socket, descriptor), 0, NULL},
    {"is_gathered", T_BOOL, offsetof(Socket, is_gathered), 0, NULL},
    {"is_full", T_BOOL, offsetof(Socket, is_full), 0, NULL},
    {"has_queued", T_BOOL, offsetof(Socket, has_queued), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot socket_slots[] = {
    {Py_tp_new, socket_new},         {Py_tp_dealloc, socket_dealloc}, {Py_tp_methods, socket_methods},
    {Py_tp_members, socket_members}, {0, NULL},
};

static PyType_Spec socket_spec = {
    "downrange._steps.Socket", sizeof(Socket), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, socket_slots,
};

/* the largest length that a frame may have, and the largest length of its header */
static PyObject *sockets_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    long long max_length, max_header;
    if (!PyArg_ParseTuple(args, "LL", &max_length, &max_header)) return NULL;
    Sockets *self = (Sockets *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->max_length = max_length, self->max_header = max_header;
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    self->space = PyMem_Malloc(MOST_BYTES);
    if (self->epoll < 0) PyErr_SetFromErrno(PyExc_OSError);
    else if (self->space == NULL) PyErr_NoMemory();
    else return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int sockets_traverse(Sockets *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t n = 0; n < self->size; n++) Py_VISIT(self->table[n]);
    return 0;
}

static int sockets_clear(Sockets *self) {
    for (Py_ssize_t n = 0; n < self->size; n++) Py_CLEAR(self->table[n]);
    return 0;
}

static PyObject *sockets_close(Sockets *self, PyObject *Py_UNUSED(unused)) {
    if (self->epoll >= 0) close(self->epoll);
    self->epoll = -1;
    sockets_clear(self);
    Py_RETURN_NONE;
}

static void sockets_dealloc(Sockets *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->epoll >= 0) close(self->epoll);
    sockets_clear(self);
    PyMem_Free(self->table);
    PyMem_Free(self->space);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *sockets_fileno(Sockets *self, PyObject *Py_UNUSED(unused)) { return PyLong_FromLong(self->epoll); }

static int has_room(Sockets *self, int descriptor) {
    if (descriptor < self->size) return 1;
    Py_ssize_t size = 2 * (Py_ssize_t)descriptor + 64;
    Socket **table = PyMem_Realloc(self->table, (size_t)size * sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    memset(table + self->size, 0, (size_t)(size - self->size) * sizeof *table);
    self->table = table, self->size = size;
    return 1;
}

/* socket, events to wait for; with no events the socket is forgotten */
static PyObject *sockets_watch(Sockets *self, PyObject *const *args, Py_ssize_t count) {
    int64_t wanted;
    if (count != 2 || !PyObject_TypeCheck(args[0], socket_type) || !as_number(args[1], 0, INT32_MAX, &wanted)
        || ((Socket *)args[0])->descriptor < 0) {
        PyErr_SetString(PyExc_ValueError, "an open socket and events are expected");
        return NULL;
    }
    Socket *socket = (Socket *)args[0];
    int descriptor = socket->descriptor;
    if (!has_room(self, descriptor)) return NULL;
    int is_known = self->table[descriptor] != NULL;
    struct epoll_event event = {.events = (uint32_t)wanted, .data.fd = descriptor};
    /* Without events the socket must leave epoll, which would report for ever that its connection broke. */
    int change = !wanted ? EPOLL_CTL_DEL : is_known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if ((wanted || is_known) && epoll_ctl(self->epoll, change, descriptor, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_XSETREF(self->table[descriptor], wanted ? (Socket *)Py_NewRef(socket) : NULL);
    Py_RETURN_NONE;
}

typedef struct {
    PyObject *frames, *sockets, *others; /* owned; when `frames` is NULL, frames stay in the space of `Sockets` */
    Py_ssize_t bytes, kept;
} Received;

static int add_other(Received *received, Socket *socket, PyObject *what) {
    PyObject *pair = what != NULL ? PyTuple_Pack(2, socket, what) : NULL;
    int is_added = pair != NULL && PyList_Append(received->others, pair) == 0;
    Py_XDECREF(pair);
    Py_XDECREF(what);
    return is_added;
}

/* The number of frames; -1 with an exception. */
static Py_ssize_t keep_frames(Received *received, const byte *at, Py_ssize_t size) {
    if (received->frames != NULL) return add_frames(received->frames, at, size);
    received->kept += size;
    Py_ssize_t count = 0;
    for (const byte *end = at + size; at < end; at += 4 + get32(at)) count++;
    return count;
}

static int may_be_gathered(const Socket *socket) {
    return socket->is_gathered && !socket->is_full
        && (socket->requests == NULL || (PyDict_CheckExact(socket->requests) && PyDict_GET_SIZE(socket->requests) == 0));
}

/* 0 with an exception. */
static int read_socket(const Sockets *self, Socket *socket, Received *received) {
    byte *space = self->space + received->kept;
    ssize_t size;
    do size = recv(socket->descriptor, space, (size_t)(MOST_BYTES - received->kept), MSG_DONTWAIT);
    while (size < 0 && errno == EINTR);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 1;
    if (size < 0) return add_other(received, socket, PyLong_FromLong(errno));
    received->bytes += size;
    int is_gathered = size > 0 && may_be_gathered(socket)
        && whole_frames(space, size, self->max_length, self->max_header) == size;
    if (!is_gathered) return add_other(received, socket, PyBytes_FromStringAndSize((char *)space, size));
    Py_ssize_t count = keep_frames(received, space, size);
    for (Py_ssize_t n = 0; n < count; n++)
        if (PyList_Append(received->sockets, (PyObject *)socket) < 0) return 0;
    return count >= 0;
}

/* 0 with an exception. */
static int read_sockets(Sockets *self, Received *received) {
    while (self->event < self->count && received->bytes < ENOUGH_BYTES) {
        const struct epoll_event event = self->events[self->event++];
        Socket *socket = event.data.fd < self->size ? self->table[event.data.fd] : NULL;
        if (socket == NULL) continue;
        Py_INCREF(socket);
        int is_good = !(event.events & EPOLLOUT) || add_other(received, socket, Py_NewRef(Py_None));
        if (is_good && event.events & ~(uint32_t)EPOLLOUT) is_good = read_socket(self, socket, received);
        Py_DECREF(socket);
        if (!is_good) return 0;
    }
    return 1;
}

static int has_events(Sockets *self) {
    if (self->event < self->count) return 1;
    self->count = epoll_wait(self->epoll, self->events, MOST_SOCKETS, 0);
    self->event = 0;
    return self->count > 0;
}

/* -> frames, the socket of each frame, and a list of all other events: (socket, bytes) for bytes that are not gathered,
   (socket, b"") at the end of a connection, (socket, error number), (socket, None) when the kernel takes more output.
   None when there is no event. */
static PyObject *sockets_receive(Sockets *self, PyObject *Py_UNUSED(unused)) {
    if (!has_events(self)) Py_RETURN_NONE;
    Received received = {PyList_New(0), PyList_New(0), PyList_New(0), 0, 0};
    if (received.frames && received.sockets && received.others && read_sockets(self, &received))
        return Py_BuildValue("(NNN)", received.frames, received.sockets, received.others);
    Py_XDECREF(received.frames);
    Py_XDECREF(received.sockets);
    Py_XDECREF(received.others);
    return NULL;
}

/* `receive` for a caller that parses frames itself: all frames come as one bytes object, one behind the other. */
static PyObject *sockets_receive_joined(Sockets *self, PyObject *Py_UNUSED(unused)) {
    if (!has_events(self)) Py_RETURN_NONE;
    Received received = {NULL, PyList_New(0), PyList_New(0), 0, 0};
    if (received.sockets && received.others && read_sockets(self, &received))
        return Py_BuildValue("(y#NN)", self->space, received.kept, received.sockets, received.others);
    Py_XDECREF(received.sockets);
    Py_XDECREF(received.others);
    return NULL;
}

/* sockets, frames one behind the other, one for each socket -> list of (socket, bytes that were not sent) */
static PyObject *send_each(PyObject *sockets, const byte *at, Py_ssize_t size) {
    const byte *end = at + size;
    PyObject *unsent = PyList_New(0);
    for (Py_ssize_t n = 0; unsent != NULL && n < PyList_GET_SIZE(sockets);) {
        PyObject *object = PyList_GET_ITEM(sockets, n);
        const byte *start = at;
        do { /* neighbouring frames of one socket leave in one call */
            if (end - at < 4 || get32(at) > (size_t)(end - at - 4) || !PyObject_TypeCheck(object, socket_type)) goto misfit;
            at += 4 + get32(at);
        } while (++n < PyList_GET_SIZE(sockets) && PyList_GET_ITEM(sockets, n) == object);
        Socket *socket = (Socket *)object;
        int must_wait = socket->is_full || socket->has_queued || socket->descriptor < 0; /* behind older output */
        ssize_t sent = must_wait ? 0 : send_now(socket, start, at - start);
        if (sent == at - start) continue;
        if (sent < 0) sent = 0; /* the next attempt to send reports the error */
        PyObject *pair = Py_BuildValue("(Oy#)", object, start + sent, (Py_ssize_t)(at - start - sent));
        if (pair == NULL || PyList_Append(unsent, pair) < 0) Py_CLEAR(unsent);
        Py_XDECREF(pair);
    }
    if (unsent == NULL || at == end) return unsent;
misfit:
    PyErr_SetString(PyExc_ValueError, "a socket and a frame for each are expected");
    Py_DECREF(unsent);
    return NULL;
}

static PyObject *send_frames(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "send_frames expects a list of sockets and frames");
        return NULL;
    }
    Py_buffer frames;
    if (PyObject_GetBuffer(args[1], &frames, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *unsent = send_each(args[0], frames.buf, frames.len);
    PyBuffer_Release(&frames);
    return unsent;
}

static PyMethodDef sockets_methods[] = {
    {"fileno", (PyCFunction)sockets_fileno, METH_NOARGS, NULL},
    {"close", (PyCFunction)sockets_close, METH_NOARGS, NULL},
    {"watch", (PyCFunction)(void (*)(void))sockets_watch, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)sockets_receive, METH_NOARGS, NULL},
    {"receive_joined", (PyCFunction)sockets_receive_joined, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sockets_slots[] = {
    {Py_tp_new, sockets_new},     {Py_tp_dealloc, sockets_dealloc}, {Py_tp_traverse, sockets_traverse},
    {Py_tp_clear, sockets_clear}, {Py_tp_methods, sockets_methods}, {0, NULL},
};

static PyType_Spec sockets_spec = {
    "downrange._steps.Sockets", sizeof(Sockets), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, sockets_slots,
};

static PyMethodDef functions[] = {
    {"send_frames", (PyCFunction)(void (*)(void))send_frames, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_sockets(PyObject *module) {
    PyObject *type = PyType_FromSpec(&sockets_spec);
    socket_type = (PyTypeObject *)PyType_FromSpec(&socket_spec);
    int is_added = type != NULL && socket_type != NULL && PyModule_AddObjectRef(module, "Sockets", type) == 0
        && PyModule_AddObjectRef(module, "Socket", (PyObject *)socket_type) == 0
        && PyModule_AddFunctions(module, functions) == 0;
    Py_XDECREF(type);
    return is_added ? 0 : -1;
}
#else
int add_sockets(PyObject *module) { return 0; }
#endif
