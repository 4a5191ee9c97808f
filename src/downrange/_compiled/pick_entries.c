/* Which entries of a queue a reader wants: TagCodes.pick of store/queue/tag_codes.py, PropertyFilter.pick of
 * store/queue/property_filter.py. Both look at one entry after the other until a reply has as much as it may have. */
#include "properties.h"
#include "records.h"

#define MOST_NAMES 16

/* Entries that were picked, and how far a look at all of them has come. */
typedef struct {
    PyObject *picked;
    byte *end;
    int64_t count, most, bytes, most_bytes, before;
    Py_ssize_t scanned;
} Pick;

static int begin(Pick *pick, Py_ssize_t entries, int64_t most, int64_t most_bytes) {
    *pick = (Pick){.most = most, .most_bytes = most_bytes};
    pick->picked = PyBytes_FromStringAndSize(NULL, (most < entries ? (Py_ssize_t)most : entries) * ENTRY_SIZE);
    if (pick->picked == NULL) return 0;
    pick->end = (byte *)PyBytes_AS_STRING(pick->picked);
    return 1;
}

/* 1: look at this entry; 0: there is enough; -1: it does not point behind the entry before. */
static inline int goes_on(Pick *pick, int64_t offset, int64_t size) {
    if (offset < pick->before) return -1;
    pick->before = offset;
    if (pick->count && (pick->count >= pick->most || pick->bytes + size > pick->most_bytes)) return 0;
    pick->scanned++;
    return 1;
}

static inline void take(Pick *pick, const byte *entry, int64_t size) {
    pick->end = put_bytes(pick->end, entry, ENTRY_SIZE);
    pick->bytes += size;
    pick->count++;
}

static PyObject *finish(Pick *pick, int is_whole) {
    if (!is_whole || _PyBytes_Resize(&pick->picked, (Py_ssize_t)pick->count * ENTRY_SIZE) < 0) {
        Py_XDECREF(pick->picked);
        return refuse();
    }
    return Py_BuildValue("Nn", pick->picked, pick->scanned);
}

static inline int holds(const int32_t *sorted, Py_ssize_t count, int32_t code) {
    while (count > 1) {
        Py_ssize_t half = count / 2;
        if (sorted[half] <= code) sorted += half;
        count -= half;
    }
    return count && *sorted == code;
}

/* entries, sorted codes as 32-bit numbers, most entries, most bytes -> picked entries, how many were looked at */
PyObject *pick_by_tags(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t most, most_bytes;
    Pick pick;
    if (count != 4 || !PyBytes_CheckExact(args[0]) || PyBytes_GET_SIZE(args[0]) % ENTRY_SIZE
        || !PyBytes_CheckExact(args[1]) || PyBytes_GET_SIZE(args[1]) % (Py_ssize_t)sizeof(int32_t)
        || !as_number(args[2], 1, INT64_MAX, &most) || !as_number(args[3], 0, INT64_MAX, &most_bytes))
        return refuse();
    const int32_t *codes = (const int32_t *)PyBytes_AS_STRING(args[1]);
    Py_ssize_t code_count = PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(int32_t);
    const byte *entry = (const byte *)PyBytes_AS_STRING(args[0]);
    const byte *stop = entry + PyBytes_GET_SIZE(args[0]);
    if (!begin(&pick, (stop - entry) / ENTRY_SIZE, most, most_bytes)) return NULL;
    int is_further = 1;
    for (; entry < stop; entry += ENTRY_SIZE) {
        int64_t size = (int32_t)get32(entry + 8);
        is_further = goes_on(&pick, get64(entry), size);
        if (is_further <= 0) break;
        if (holds(codes, code_count, (int32_t)get32(entry + 16))) take(&pick, entry, size);
    }
    return finish(&pick, is_further >= 0);
}

/* --- by properties ------------------------------------------------------------------------------------------------ */

/* The properties that a condition asks for, and their values in one record. */
typedef struct {
    Py_ssize_t count;
    PyObject *names[MOST_NAMES];
    Text keys[MOST_NAMES], values[MOST_NAMES];
    PyObject *table, *find; /* name -> value or None, and how to ask it */
} Wanted;

static int open_wanted(PyObject *names, Wanted *wanted) {
    *wanted = (Wanted){0};
    if (!PyTuple_CheckExact(names) || PyTuple_GET_SIZE(names) > MOST_NAMES) return 0;
    wanted->count = PyTuple_GET_SIZE(names);
    for (Py_ssize_t n = 0; n < wanted->count; n++) {
        PyObject *pair = PyTuple_GET_ITEM(names, n);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) return 0;
        PyObject *name = PyTuple_GET_ITEM(pair, 0), *key = PyTuple_GET_ITEM(pair, 1);
        if (!PyUnicode_CheckExact(name) || !PyBytes_CheckExact(key)) return 0;
        wanted->names[n] = name;
        wanted->keys[n] = (Text){.at = (const byte *)PyBytes_AS_STRING(key), .size = PyBytes_GET_SIZE(key)};
    }
    wanted->table = PyDict_New();
    if (wanted->table != NULL) wanted->find = PyObject_GetAttrString(wanted->table, "get");
    return wanted->find != NULL;
}

static void close_wanted(Wanted *wanted) {
    Py_XDECREF(wanted->find);
    Py_XDECREF(wanted->table);
}

/* The values that the record has. */
static void find_values(Wanted *wanted, const Record *record) {
    for (Py_ssize_t n = 0; n < wanted->count; n++) wanted->values[n].size = 0;
    const byte *at = record->properties;
    for (Property property; next_property(&at, record->properties + record->properties_size, &property);)
        for (Py_ssize_t n = 0; n < wanted->count; n++)
            if (has_name(&property, wanted->keys[n].at, wanted->keys[n].size))
                wanted->values[n] = (Text){.at = property.value, .size = property.value_size};
}

static int fill_table(Wanted *wanted) {
    for (Py_ssize_t n = 0; n < wanted->count; n++) {
        const Text *value = &wanted->values[n];
        PyObject *text = Py_NewRef(Py_None);
        if (value->size) {
            Py_DECREF(text);
            text = PyUnicode_DecodeUTF8((const char *)value->at, value->size, "replace");
        }
        if (text == NULL) return 0;
        int failed = PyDict_SetItem(wanted->table, wanted->names[n], text);
        Py_DECREF(text);
        if (failed) return 0;
    }
    return 1;
}

/* 1 or 0; -1 when the condition raises: then Python asks it again, and reports the error. */
static int says_yes(PyObject *condition, PyObject *find) {
    PyObject *answer = PyObject_CallOneArg(condition, find);
    if (answer == NULL) {
        int is_no = PyErr_ExceptionMatches(PyExc_ValueError);
        if (is_no || (PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError)))
            PyErr_Clear();
        return is_no ? 0 : -1;
    }
    Py_DECREF(answer);
    return answer == Py_True;
}

/* (entries, log, start, readable, most bytes), most entries, ((name, name as bytes), ...), condition
   -> picked entries, how many were looked at */
PyObject *pick_by_properties(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t most;
    Backlog backlog;
    Wanted wanted;
    Pick pick;
    if (count != 4 || !as_number(args[1], 1, INT64_MAX, &most) || !PyCallable_Check(args[3])
        || !open_backlog(args[0], &backlog))
        return refuse();
    if (!open_wanted(args[2], &wanted) || !begin(&pick, backlog.count, most, backlog.most_bytes)) {
        close_wanted(&wanted);
        PyBuffer_Release(&backlog.log);
        return refuse();
    }
    const byte *log = backlog.log.buf;
    int is_further = 1;
    for (Py_ssize_t n = 0; n < backlog.count; n++) {
        const byte *entry = backlog.entries + n * ENTRY_SIZE;
        int64_t offset = get64(entry), size = (int32_t)get32(entry + 8);
        is_further = goes_on(&pick, offset, size);
        if (is_further <= 0) break;
        Record record;
        int answer = -1;
        if (size > 0 && size <= backlog.readable && offset >= backlog.start
            && offset - backlog.start <= backlog.readable - size
            && read_record(log + (offset - backlog.start), (Py_ssize_t)size, &record)) {
            find_values(&wanted, &record);
            if (fill_table(&wanted)) answer = says_yes(args[3], wanted.find);
        }
        if (answer < 0) {
            is_further = -1;
            break;
        }
        if (answer) take(&pick, entry, size);
    }
    close_wanted(&wanted);
    PyBuffer_Release(&backlog.log);
    return finish(&pick, is_further >= 0);
}
