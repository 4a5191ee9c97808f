/* Many records at once for Spark's workers: spark/record_arrays.py, walk, and spark/property_arrays.py.
 *
 * Numbers come and go as the bytes of NumPy and Arrow arrays, in the machine's own byte order. Arrow finds the text
 * number n of a column between the edges n and n + 1 of its data.
 */
#include "properties.h"
#include "records.h"

#define MOST_PAIRS 64
#define MOST_COLUMNS 8
#define AHEAD 12 /* rows; their texts are fetched into the cache meanwhile */

/* Where the records of `buffer` begin, one behind the other; None when they do not end with it. */
PyObject *walk_records(PyObject *Py_UNUSED(module), PyObject *buffer) {
    Py_buffer view;
    PyObject *starts = NULL;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    const byte *bytes = view.buf;
    Py_ssize_t count = 0, at = 0;
    while (view.len - at >= FIXED_SIZE) {
        uint32_t size = get32(bytes + at);
        if (size < FIXED_SIZE || size > (uint64_t)(view.len - at)) break;
        at += size;
        count++;
    }
    if (at == view.len) starts = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (starts != NULL) {
        int64_t *start = (int64_t *)PyBytes_AS_STRING(starts);
        at = 0;
        for (Py_ssize_t n = 0; n < count; n++) {
            start[n] = at;
            at += get32(bytes + at);
        }
    }
    PyBuffer_Release(&view);
    return starts != NULL ? starts : refuse();
}

/* Texts one behind the other, on their way to become an Arrow array. */
typedef struct {
    PyObject *edges, *data;
    int32_t *edge; /* the end of the last text */
    byte *begin, *end;
} Texts;

static int open_texts(Texts *texts, Py_ssize_t most, Py_ssize_t most_bytes) {
    texts->edges = PyBytes_FromStringAndSize(NULL, (most + 1) * (Py_ssize_t)sizeof(int32_t));
    texts->data = PyBytes_FromStringAndSize(NULL, most_bytes);
    if (texts->edges == NULL || texts->data == NULL) return 0;
    texts->edge = (int32_t *)PyBytes_AS_STRING(texts->edges);
    texts->begin = texts->end = (byte *)PyBytes_AS_STRING(texts->data);
    *texts->edge = 0;
    return 1;
}

static inline void add_text(Texts *texts, const byte *from, Py_ssize_t size) {
    memcpy(texts->end, from, (size_t)size);
    texts->end += size;
    *++texts->edge = (int32_t)(texts->end - texts->begin);
}

/* Give back the room that was not needed. */
static int close_texts(Texts *texts) {
    Py_ssize_t edges = (byte *)(texts->edge + 1) - (byte *)PyBytes_AS_STRING(texts->edges);
    return _PyBytes_Resize(&texts->edges, edges) == 0 && _PyBytes_Resize(&texts->data, texts->end - texts->begin) == 0;
}

static void drop_texts(Texts *texts) {
    Py_CLEAR(texts->edges);
    Py_CLEAR(texts->data);
}

/* One property as a column; a bit of `valid` for each row that has it. */
typedef struct {
    Text name;
    Texts texts;
    PyObject *valid;
    Py_ssize_t found;
} Column;

typedef struct {
    Column columns[MOST_COLUMNS];
    Py_ssize_t column_count, rows;
    int wants_map;
    PyObject *map_edges;
    Texts names, values;
    byte all_bits;
} Split;

/* Forget the property of this name, if there is one. Returns how many are left. */
static int without_name(Property *pairs, int count, const Property *other) {
    for (int n = 0; n < count; n++)
        if (has_name(&pairs[n], other->name, other->name_size)) {
            memmove(pairs + n, pairs + n + 1, (size_t)(count - n - 1) * sizeof *pairs);
            return count - 1;
        }
    return count;
}

/* The properties of one text, each name once; -1 when they are more than MOST_PAIRS. */
static int pairs_of(const byte *at, const byte *end, Property *pairs) {
    int count = 0;
    for (Property property; next_property(&at, end, &property); pairs[count++] = property) {
        count = without_name(pairs, count, &property);
        if (count == MOST_PAIRS) return -1;
    }
    return count;
}

static int take_row(Split *split, Py_ssize_t row, const byte *at, const byte *end) {
    Property pairs[MOST_PAIRS];
    int count = pairs_of(at, end, pairs);
    if (count < 0) return 0;
    for (; at < end; at++) split->all_bits |= *at;
    for (Py_ssize_t k = 0; k < split->column_count; k++) {
        Column *column = &split->columns[k];
        int n = 0;
        while (n < count && !has_name(&pairs[n], column->name.at, column->name.size)) n++;
        if (n < count) {
            add_text(&column->texts, pairs[n].value, pairs[n].value_size);
            PyBytes_AS_STRING(column->valid)[row / 8] |= (char)(1 << row % 8);
            column->found++;
        } else add_text(&column->texts, end, 0);
    }
    if (split->wants_map) {
        for (int n = 0; n < count; n++) {
            add_text(&split->names, pairs[n].name, pairs[n].name_size);
            add_text(&split->values, pairs[n].value, pairs[n].value_size);
        }
        int32_t *edges = (int32_t *)PyBytes_AS_STRING(split->map_edges);
        edges[row + 1] = edges[row] + count;
    }
    return 1;
}

static int open_split(Split *split, PyObject *names, Py_ssize_t bytes) {
    for (Py_ssize_t k = 0; k < split->column_count; k++) {
        PyObject *name = PyTuple_GET_ITEM(names, k);
        Column *column = &split->columns[k];
        if (!PyBytes_CheckExact(name)) return 0;
        column->name = (Text){(const byte *)PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), 0, 0};
        column->valid = PyBytes_FromStringAndSize(NULL, (split->rows + 7) / 8);
        if (column->valid == NULL || !open_texts(&column->texts, split->rows, bytes)) return 0;
        memset(PyBytes_AS_STRING(column->valid), 0, (size_t)(split->rows + 7) / 8);
    }
    if (!split->wants_map) return 1;
    split->map_edges = PyBytes_FromStringAndSize(NULL, (split->rows + 1) * (Py_ssize_t)sizeof(int32_t));
    if (split->map_edges == NULL) return 0;
    *(int32_t *)PyBytes_AS_STRING(split->map_edges) = 0;
    /* A pair has a name, a separator and a value: three bytes at least. */
    return open_texts(&split->names, bytes / 3, bytes) && open_texts(&split->values, bytes / 3, bytes);
}

static PyObject *close_split(Split *split) {
    PyObject *columns = PyTuple_New(split->column_count), *map = Py_None;
    if (columns == NULL) return NULL;
    for (Py_ssize_t k = 0; k < split->column_count; k++) {
        Column *column = &split->columns[k];
        PyObject *one = NULL;
        if (close_texts(&column->texts))
            one = PyTuple_Pack(3, column->found == split->rows ? Py_None : column->valid, column->texts.edges,
                               column->texts.data);
        if (one == NULL) goto failed;
        PyTuple_SET_ITEM(columns, k, one);
    }
    if (split->wants_map) {
        if (!close_texts(&split->names) || !close_texts(&split->values)) goto failed;
        map = PyTuple_Pack(5, split->map_edges, split->names.edges, split->names.data, split->values.edges,
                           split->values.data);
        if (map == NULL) goto failed;
    } else Py_INCREF(map);
    return Py_BuildValue("(ONN)", split->all_bits < 0x80 ? Py_True : Py_False, columns, map);
failed:
    Py_DECREF(columns);
    return NULL;
}

static void drop_split(Split *split) {
    for (Py_ssize_t k = 0; k < split->column_count; k++) {
        drop_texts(&split->columns[k].texts);
        Py_CLEAR(split->columns[k].valid);
    }
    drop_texts(&split->names);
    drop_texts(&split->values);
    Py_CLEAR(split->map_edges);
}

/* Do the pieces lie in the buffer, and how many bytes are they? -1 when they do not, or when they are too many. */
static int64_t bytes_of(const int64_t *starts, const int64_t *stops, Py_ssize_t count, Py_ssize_t end) {
    int64_t total = 0;
    for (Py_ssize_t n = 0; n < count; n++) {
        if (starts[n] < 0 || stops[n] < starts[n] || stops[n] > end) return -1;
        total += stops[n] - starts[n];
        if (total > INT32_MAX) return -1;
    }
    return total;
}

static int is_aligned(const void *at) { return (uintptr_t)at % sizeof(int64_t) == 0; }

/* split_properties(buffer, starts, stops, names, wants_map): the texts between starts and stops, split.
 *
 * Returns (are all bytes ASCII, a column for each name, map). A column is (validity or None, edges, data), the map
 * (edges of rows, edges of names, names, edges of values, values) or None. */
PyObject *split_properties(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_buffer views[3];
    Split split = {0};
    PyObject *result = NULL;
    int held = 0;
    if (count != 5 || !PyTuple_CheckExact(args[3]) || !PyBool_Check(args[4])) return refuse();
    while (held < 3 && PyObject_GetBuffer(args[held], &views[held], PyBUF_SIMPLE) == 0) held++;
    if (held < 3) PyErr_Clear();
    else if (PyTuple_GET_SIZE(args[3]) <= MOST_COLUMNS && views[1].len == views[2].len
             && views[1].len % (Py_ssize_t)sizeof(int64_t) == 0
             && (views[1].len == 0 || (is_aligned(views[1].buf) && is_aligned(views[2].buf)))) {
        const int64_t *starts = views[1].buf, *stops = views[2].buf;
        split.column_count = PyTuple_GET_SIZE(args[3]);
        split.rows = views[1].len / (Py_ssize_t)sizeof(int64_t);
        split.wants_map = args[4] == Py_True;
        int64_t bytes = split.rows < INT32_MAX ? bytes_of(starts, stops, split.rows, views[0].len) : -1;
        int is_good = bytes >= 0 && open_split(&split, args[3], (Py_ssize_t)bytes);
        const byte *base = views[0].buf;
        for (Py_ssize_t row = 0; is_good && row < split.rows; row++) {
            if (row + AHEAD < split.rows) __builtin_prefetch(base + starts[row + AHEAD]);
            is_good = take_row(&split, row, base + starts[row], base + stops[row]);
        }
        if (is_good) result = close_split(&split);
        drop_split(&split);
    }
    while (held > 0) PyBuffer_Release(&views[--held]);
    return result != NULL ? result : refuse();
}
