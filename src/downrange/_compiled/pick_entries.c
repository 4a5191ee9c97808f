/* Which entries of a queue a reader wants: pick_all of store/queue/backlog.py, pick_by_tags of store/queue/tag_codes.py,
 * pick_by_properties of store/queue/property_filter.py. Each looks at one entry after the other until a reply has as much
 * as it may have. */
#include "properties.h"
#include "records.h"

#define MOST_NAMES 16

/* Entries that were picked, and how far a look at all of them has come. */
typedef struct {
    Backlog backlog;
    PyObject *picked;
    byte *end;
    int64_t count, most, bytes, most_bytes, before;
    Py_ssize_t scanned;
} Pick;

/* The first three arguments of each function: the backlog, most entries, most bytes. 0 with an exception if they are wrong. */
static int begin(Pick *pick, PyObject *const *args) {
    *pick = (Pick){0};
    if (!as_number(args[1], 1, INT64_MAX, &pick->most) || !as_number(args[2], 0, INT64_MAX, &pick->most_bytes)) {
        PyErr_SetString(PyExc_TypeError, "most entries and most bytes are numbers");
        return 0;
    }
    if (!open_backlog(args[0], &pick->backlog)) return 0;
    pick->before = pick->backlog.start;
    Py_ssize_t count = pick->backlog.count;
    pick->picked = PyBytes_FromStringAndSize(NULL, (pick->most < count ? (Py_ssize_t)pick->most : count) * ENTRY_SIZE);
    if (pick->picked == NULL) {
        PyBuffer_Release(&pick->backlog.log);
        return 0;
    }
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

/* 0 when its record does not lie in the file. */
static inline int take(Pick *pick, const byte *entry, int64_t offset, int64_t size) {
    if (!lies_within(&pick->backlog, offset, size)) return 0;
    pick->end = put_bytes(pick->end, entry, ENTRY_SIZE);
    pick->bytes += size;
    pick->count++;
    return 1;
}

/* The picked entries, how many were looked at, bytes of their records; None if an entry was not as usual. */
static PyObject *finish(Pick *pick, int is_usual) {
    PyBuffer_Release(&pick->backlog.log);
    if (!is_usual || _PyBytes_Resize(&pick->picked, (Py_ssize_t)pick->count * ENTRY_SIZE) < 0) {
        Py_XDECREF(pick->picked);
        return refuse();
    }
    return Py_BuildValue("NnL", pick->picked, pick->scanned, (long long)pick->bytes);
}

static inline int holds(const int32_t *sorted, Py_ssize_t count, int32_t code) {
    while (count > 1) {
        Py_ssize_t half = count / 2;
        if (sorted[half] <= code) sorted += half;
        count -= half;
    }
    return count && *sorted == code;
}

/* Without codes every entry is wanted. */
static PyObject *pick_by_codes(Pick *pick, const int32_t *codes, Py_ssize_t code_count) {
    const byte *entry = pick->backlog.entries;
    int is_further = 1;
    for (Py_ssize_t n = 0; n < pick->backlog.count; n++, entry += ENTRY_SIZE) {
        int64_t offset = get64(entry), size = (int32_t)get32(entry + 8);
        is_further = goes_on(pick, offset, size);
        if (is_further > 0 && (codes == NULL || holds(codes, code_count, (int32_t)get32(entry + 16)))
            && !take(pick, entry, offset, size))
            is_further = -1;
        if (is_further <= 0) break;
    }
    return finish(pick, is_further >= 0);
}

/* backlog, most entries, most bytes -> picked entries, how many were looked at, bytes of their records */
PyObject *pick_all(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Pick pick;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "pick_all(backlog, most entries, most bytes)");
        return NULL;
    }
    return begin(&pick, args) ? pick_by_codes(&pick, NULL, 0) : NULL;
}

/* backlog, most entries, most bytes, sorted codes as 32-bit numbers -> as pick_all */
PyObject *pick_by_tags(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Pick pick;
    if (count != 4 || !PyBytes_CheckExact(args[3]) || PyBytes_GET_SIZE(args[3]) % (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_TypeError, "pick_by_tags(backlog, most entries, most bytes, sorted 32-bit codes)");
        return NULL;
    }
    if (!begin(&pick, args)) return NULL;
    Py_ssize_t code_count = PyBytes_GET_SIZE(args[3]) / (Py_ssize_t)sizeof(int32_t);
    return pick_by_codes(&pick, (const int32_t *)PyBytes_AS_STRING(args[3]), code_count);
}

/* --- by properties ------------------------------------------------------------------------------------------------ */

/* The properties that a condition asks for, and their values in one record. */
typedef struct {
    Py_ssize_t count;
    PyObject *names[MOST_NAMES];
    Text keys[MOST_NAMES], values[MOST_NAMES];
    PyObject *table, *find; /* name -> value or None, and how to ask it */
} Wanted;

/* 1, or 0 with an exception; there are no more than MOST_NAMES. */
static int open_wanted(PyObject *names, Wanted *wanted) {
    *wanted = (Wanted){.count = PyTuple_GET_SIZE(names)};
    for (Py_ssize_t n = 0; n < wanted->count; n++) {
        PyObject *pair = PyTuple_GET_ITEM(names, n);
        PyObject *name = NULL, *key = NULL;
        if (PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2)
            name = PyTuple_GET_ITEM(pair, 0), key = PyTuple_GET_ITEM(pair, 1);
        if (name == NULL || !PyUnicode_CheckExact(name) || !PyBytes_CheckExact(key)) {
            PyErr_SetString(PyExc_TypeError, "each name comes with its bytes");
            return 0;
        }
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

/* backlog, most entries, most bytes, ((name, name as bytes), ...), condition -> as pick_all */
PyObject *pick_by_properties(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Wanted wanted;
    Pick pick;
    if (count != 5 || !PyTuple_CheckExact(args[3]) || !PyCallable_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "pick_by_properties(backlog, most entries, most bytes, names, condition)");
        return NULL;
    }
    if (PyTuple_GET_SIZE(args[3]) > MOST_NAMES) Py_RETURN_NONE;
    if (!open_wanted(args[3], &wanted) || !begin(&pick, args)) {
        close_wanted(&wanted);
        return NULL;
    }
    const Backlog *backlog = &pick.backlog;
    const byte *log = backlog->log.buf;
    int is_further = 1;
    for (Py_ssize_t n = 0; n < backlog->count; n++) {
        const byte *entry = backlog->entries + n * ENTRY_SIZE;
        int64_t offset = get64(entry), size = (int32_t)get32(entry + 8);
        is_further = goes_on(&pick, offset, size);
        if (is_further <= 0) break;
        Record record;
        int answer = -1;
        if (lies_within(backlog, offset, size)
            && read_record(log + (offset - backlog->start), (Py_ssize_t)size, &record)) {
            find_values(&wanted, &record);
            if (fill_table(&wanted)) answer = says_yes(args[4], wanted.find);
        }
        if (answer < 0) {
            is_further = -1;
            break;
        }
        if (answer) take(&pick, entry, offset, size);
    }
    close_wanted(&wanted);
    return finish(&pick, is_further >= 0);
}
