/* An open table: a topic stands at the first free place from its hash on, so that nearly always one look is enough. */
#include <stdlib.h>
#include "topic_table.h"

#define LEAST_SLOTS 64
#define MOST_ROWS 1024 /* of a topic that is remembered row by row */

static int read_destination(const byte *start, Py_ssize_t size, Destination *destination) {
    int32_t queues = -1;
    const Py_ssize_t number = sizeof queues;
    if (size > number) memcpy(&queues, start, sizeof queues);
    if (queues < 0 || queues > (size - number - 1) / number) return 0;
    destination->queues = queues;
    destination->rows = start + number;
    destination->topic = destination->rows + queues * number;
    destination->topic_size = start + size - destination->topic;
    return 1;
}

static const byte *known_of(const Slot *slot) {
    return slot->size <= NEAR ? slot->near : (const byte *)PyBytes_AS_STRING(slot->packed);
}

uint32_t hash_topic(const TopicTable *table, const byte *topic, Py_ssize_t size) {
    uint64_t hash = table->seed ^ (uint64_t)size, eight;
    while (size > 0) {
        eight = 0;
        memcpy(&eight, topic, size < 8 ? (size_t)size : 8);
        hash = (hash ^ eight) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
        topic += 8, size -= 8;
    }
    return (uint32_t)hash;
}

static Slot *find_slot(const TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, Destination *found) {
    for (uint64_t at = hash & table->mask; table->slots[at].size != 0; at = (at + 1) & table->mask) {
        Slot *slot = &table->slots[at];
        if (slot->hash == hash && read_destination(known_of(slot), slot->size, found) && found->topic_size == size + 1
            && !memcmp(found->topic + 1, topic, (size_t)size))
            return slot;
    }
    return NULL;
}

int find_topic(const TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, Destination *found) {
    return find_slot(table, hash, topic, size, found) != NULL;
}

static void put_slot(Slot *slots, uint64_t mask, const Slot *slot) {
    uint64_t at = slot->hash & mask;
    while (slots[at].size != 0) at = (at + 1) & mask;
    slots[at] = *slot;
}

static int make_slots(TopicTable *table, uint64_t count) {
    void *slots;
    if (posix_memalign(&slots, sizeof(Slot), count * sizeof(Slot)) != 0) {
        PyErr_NoMemory();
        return 0;
    }
    memset(slots, 0, count * sizeof(Slot));
    for (uint64_t at = 0; table->slots != NULL && at <= table->mask; at++)
        if (table->slots[at].size != 0) put_slot(slots, count - 1, &table->slots[at]);
    free(table->slots);
    table->slots = slots, table->mask = count - 1;
    return 1;
}

int keep_topic(TopicTable *table, uint32_t hash, PyObject *packed) {
    Destination destination;
    if (!PyBytes_CheckExact(packed) || PyBytes_GET_SIZE(packed) > INT32_MAX) return 0;
    const byte *start = (const byte *)PyBytes_AS_STRING(packed);
    Slot slot = {.hash = hash, .size = (int32_t)PyBytes_GET_SIZE(packed), .packed = packed};
    if (!read_destination(start, slot.size, &destination)) return 0;
    if ((uint64_t)table->used * 2 > table->mask && !make_slots(table, 2 * (table->mask + 1))) return 0;
    if (slot.size <= NEAR) memcpy(slot.near, start, (size_t)slot.size);
    Py_INCREF(packed);
    put_slot(table->slots, table->mask, &slot);
    table->used++;
    return 1;
}

static void put_number(byte *at, int64_t number) {
    int32_t as_kept = (int32_t)number;
    memcpy(at, &as_kept, sizeof as_kept);
}

int keep_row(TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, int64_t queue_id, int64_t row) {
    const Py_ssize_t number = sizeof(int32_t);
    Destination known = {0};
    if (size > UINT8_MAX || queue_id < 0 || queue_id >= MOST_ROWS || row < 0 || row > INT32_MAX) return 0;
    Slot *slot = find_slot(table, hash, topic, size, &known);
    Py_ssize_t rows = slot == NULL ? 0 : known.queues, queues = rows > queue_id ? rows : (Py_ssize_t)queue_id + 1;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, number * (1 + queues) + 1 + size);
    if (packed == NULL) return 0;
    byte *at = (byte *)PyBytes_AS_STRING(packed), *field = at + number * (1 + queues);
    put_number(at, queues);
    for (Py_ssize_t id = 0; id < queues; id++)
        put_number(at + number * (1 + id), id == queue_id ? row : slot == NULL ? -1 : row_of_queue(&known, id));
    field[0] = (byte)size;
    put_bytes(field + 1, topic, size);
    int is_kept = 1;
    if (slot == NULL) is_kept = keep_topic(table, hash, packed);
    else {
        PyObject *before = slot->packed;
        slot->packed = Py_NewRef(packed), slot->size = (int32_t)PyBytes_GET_SIZE(packed);
        if (slot->size <= NEAR) memcpy(slot->near, at, (size_t)slot->size);
        Py_DECREF(before);
    }
    Py_DECREF(packed);
    return is_kept;
}

static int64_t learn_row(PyObject *by_topic, TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size,
                         int64_t queue_id) {
    PyObject *key = Py_BuildValue("(y#L)", topic, size, (long long)queue_id);
    PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(by_topic, key);
    Py_XDECREF(key);
    if (state == NULL || state == Py_None) return -1;
    Py_INCREF(state);
    PyObject *number = PyObject_GetAttr(state, s_row), *is_special = PyObject_GetAttr(state, s_is_special);
    int64_t row = -1;
    if (is_special == Py_False) as_number(number, 0, INT64_MAX, &row);
    Py_DECREF(state);
    Py_XDECREF(number);
    Py_XDECREF(is_special);
    if (row >= 0) keep_row(table, hash, topic, size, queue_id, row);
    return PyErr_Occurred() ? -1 : row;
}

int64_t find_row(PyObject *by_topic, TopicTable *table, uint32_t hash, const byte *topic, Py_ssize_t size, int64_t queue_id) {
    Destination to;
    int64_t row = -1;
    if (find_topic(table, hash, topic, size, &to)) row = row_of_queue(&to, queue_id);
    return row >= 0 ? row : learn_row(by_topic, table, hash, topic, size, queue_id);
}

static void free_slots(TopicTable *table) {
    for (uint64_t at = 0; table->slots != NULL && at <= table->mask; at++) Py_XDECREF(table->slots[at].packed);
    free(table->slots);
    table->slots = NULL, table->used = 0;
}

static PyObject *forget_topic(TopicTable *table, PyObject *topic) {
    Py_ssize_t size;
    const char *name = PyUnicode_AsUTF8AndSize(topic, &size);
    if (name == NULL) return NULL;
    Destination found;
    Slot *slot = find_slot(table, hash_topic(table, (const byte *)name, size), (const byte *)name, size, &found);
    if (slot == NULL) Py_RETURN_NONE;
    PyObject *packed = slot->packed;
    *slot = (Slot){.size = 0};
    table->used--;
    /* Those behind it may stand there only because their own places were taken. */
    for (uint64_t at = (uint64_t)(slot - table->slots + 1) & table->mask; table->slots[at].size != 0;
         at = (at + 1) & table->mask) {
        Slot moved = table->slots[at];
        table->slots[at] = (Slot){.size = 0};
        put_slot(table->slots, table->mask, &moved);
    }
    Py_DECREF(packed);
    Py_RETURN_NONE;
}

static PyObject *clear_table(TopicTable *table, PyObject *Py_UNUSED(nothing)) {
    Slot *before = table->slots;
    uint64_t mask = table->mask;
    table->slots = NULL;
    if (!make_slots(table, LEAST_SLOTS)) {
        table->slots = before;
        return NULL;
    }
    TopicTable old = {.slots = before, .mask = mask};
    table->used = 0;
    free_slots(&old);
    Py_RETURN_NONE;
}

static PyObject *new_table(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(names)) {
    TopicTable *table = (TopicTable *)type->tp_alloc(type, 0);
    if (table == NULL) return NULL;
    table->seed = (uint64_t)(uintptr_t)table * 0xD6E8FEB86659FD93u; /* where it lies in memory cannot be known by others */
    if (make_slots(table, LEAST_SLOTS)) return (PyObject *)table;
    Py_DECREF(table);
    return NULL;
}

static void free_table(TopicTable *table) {
    free_slots(table);
    Py_TYPE(table)->tp_free(table);
}

static Py_ssize_t length_of(PyObject *table) { return ((TopicTable *)table)->used; }

static PyMethodDef methods[] = {
    {"forget", (PyCFunction)forget_topic, METH_O, NULL},
    {"clear", (PyCFunction)clear_table, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = length_of};

PyTypeObject topic_table_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "downrange._steps.TopicTable",
    .tp_basicsize = sizeof(TopicTable),
    .tp_new = new_table,
    .tp_dealloc = (destructor)free_table,
    .tp_methods = methods,
    .tp_as_sequence = &as_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};
