/* A piece of the log against its queues and its key index: store/check/store_check.py.
 *
 * Goes from record to record and stops in front of the first one of which not everything is as it should be, or not the
 * usual way, which its twin then looks at.
 */
#include "dispatching.h"
#include "properties.h"
#include "records.h"
#include "topic_table.h"

#define AHEAD 16     /* records that are read before the first of them is compared */
#define MOST (INT64_MAX / ENTRY_SIZE) /* entries that a queue can have */
#define MOST_KEYS 16 /* of a record that is compared here */

/* The numbers of a queue: the layout of store/check/queues_in_log.py. */
enum { RECORDS, FIRST_PHYSICAL, LAST_OFFSET, LAST_PHYSICAL, AFTER_GAP, SEEN_FROM, SEEN_TO, SEEN_LAST, BLOCK_AT, FROM,
       LOADED, ASKED_TO, NUMBERS };

/* The index file that the next keys stand in: IndexCheck.place. */
typedef struct {
    Py_buffer memory, newest;
    int64_t slots, number, end, begin_timestamp;
    int is_open, is_reached;
} IndexPlace;

typedef struct {
    PyObject *queues;
    TopicTable *topics;
    Py_buffer bytes, rows, blocks;
    int64_t block_size, last_timestamp;
    Keys keys;
    IndexPlace index;
    int has_index;
} Check;

static int64_t *check_row_at(const Check *check, int64_t row) {
    if (row < 0 || row % NUMBERS || row > check->rows.len / (Py_ssize_t)sizeof(int64_t) - NUMBERS) return NULL;
    return (int64_t *)check->rows.buf + row;
}

static int64_t *known_row(const Check *check, const Record *record) {
    Destination to;
    if (!find_topic(check->topics, record->topic_hash, record->topic, record->topic_size, &to)) return NULL;
    return check_row_at(check, row_of_queue(&to, record->queue_id));
}

/* Look the queue of a record up as its twin does, and remember its row; NULL when it is not known. */
static int64_t *learn_row(const Check *check, const Record *record) {
    PyObject *key = Py_BuildValue("(y#i)", record->topic, record->topic_size, (int)record->queue_id);
    PyObject *number = key == NULL ? NULL : PyDict_GetItemWithError(check->queues, key);
    int64_t row;
    int64_t *found = as_number(number, 0, INT64_MAX, &row) ? check_row_at(check, row) : NULL;
    Py_XDECREF(key);
    if (found != NULL && !keep_row(check->topics, record->topic_hash, record->topic, record->topic_size,
                                   record->queue_id, row) && PyErr_Occurred())
        return NULL;
    return found;
}

static int is_loaded(const int64_t *row, int64_t queue_offset) {
    return row[FROM] >= 0 && row[FROM] <= queue_offset && queue_offset - row[FROM] < row[LOADED];
}

/* The entry of a loaded queue offset; NULL when the row says what cannot be. */
static const byte *entry_of(const Check *check, const int64_t *row, int64_t queue_offset) {
    if (row[LOADED] > check->block_size / ENTRY_SIZE || row[BLOCK_AT] < 0
        || row[BLOCK_AT] > check->blocks.len - check->block_size)
        return NULL;
    return (const byte *)check->blocks.buf + row[BLOCK_AT] + ENTRY_SIZE * (queue_offset - row[FROM]);
}

/* Would it help to have other entries of the queue? */
static int wants_block(const int64_t *row, int64_t queue_offset) {
    return queue_offset >= 0 && queue_offset <= MOST && !is_loaded(row, queue_offset)
        && !(row[FROM] <= queue_offset && queue_offset < row[ASKED_TO]);
}

/* Are topic and properties text that ends with something else than a zero? 0 also when it takes more to find out. */
static int is_plain_text(const byte *at, Py_ssize_t size) {
    if (size > 0 && at[size - 1] == 0) return 0;
    for (Py_ssize_t n = 0; n < size; n++) {
        if (at[n] >= 0x80) {
            PyObject *text = PyUnicode_DecodeUTF8((const char *)at + n, size - n, NULL);
            if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
            Py_XDECREF(text);
            return text != NULL;
        }
    }
    return 1;
}

/* Do the next entries of the index hold exactly the keys of this record? 0 also when its twin has to say. */
static int is_indexed(const IndexPlace *index, const Record *record, const Keys *keys) {
    if (!index->is_open) return keys->count == 0;
    if (index->number >= index->end) return 0;
    const byte *entry = (byte *)index->memory.buf + 40 + 4 * index->slots + ENTRY_SIZE * index->number;
    int64_t physical_offset = get64(entry + 4);
    if (physical_offset > record->physical_offset) return keys->count == 0 || !index->is_reached;
    if (physical_offset < record->physical_offset || keys->count == 0 || keys->count > MOST_KEYS) return 0;
    /* The first entry of a file and the last are special; and the one behind ours must not be of this record. */
    if (index->number < 2 || keys->count >= index->end - index->number) return 0;
    if (get64(entry + ENTRY_SIZE * keys->count + 4) <= record->physical_offset) return 0;
    int64_t seconds = record->store_timestamp < index->begin_timestamp
        ? 0 : (int64_t)(((uint64_t)record->store_timestamp - (uint64_t)index->begin_timestamp) / 1000);
    if (seconds > INT32_MAX || seconds < 0) seconds = INT32_MAX;
    for (Py_ssize_t n = 0; n < keys->count; n++, entry += ENTRY_SIZE) {
        uint32_t hash = keys->keys[n].hash;
        int64_t before;
        int32_t newest;
        memcpy(&newest, (byte *)index->newest.buf + 4 * (hash % index->slots), sizeof newest);
        before = newest;
        for (Py_ssize_t m = 0; m < n; m++)
            if (keys->keys[m].hash % index->slots == hash % index->slots) before = index->number + m;
        if (get32(entry) != hash || get64(entry + 4) != record->physical_offset || get32(entry + 12) != seconds
            || (int32_t)get32(entry + 16) != before)
            return 0;
    }
    return 1;
}

static void pass_keys(IndexPlace *index, const Record *record, const Keys *keys) {
    if (!index->is_open || keys->count == 0) return;
    const byte *entry = (byte *)index->memory.buf + 40 + 4 * index->slots + ENTRY_SIZE * index->number;
    if (get64(entry + 4) != record->physical_offset) return;
    for (Py_ssize_t n = 0; n < keys->count; n++) {
        int32_t number = (int32_t)index->number++;
        memcpy((byte *)index->newest.buf + 4 * (keys->keys[n].hash % index->slots), &number, sizeof number);
    }
    index->is_reached = 1;
}

/* Compare one record with all that is known; 0, and nothing was noted, when its twin has to. */
static int compare(Check *check, const Record *record, int64_t *row) {
    Part tags, unique_key, keys;
    uint32_t code = 0, start = 0;
    if (get64(record->start + 28) != record->physical_offset || record->store_timestamp < check->last_timestamp) return 0;
    if (record->queue_offset < 0 || record->queue_offset > MOST || row[RECORDS] < 0 || row[RECORDS] > MOST
        || !is_plain_text(record->topic, record->topic_size)
        || !is_plain_text(record->properties, record->properties_size))
        return 0;
    int is_first = record->queue_offset == 0 || row[RECORDS] == 0;
    if (!is_first && record->queue_offset - 1 != row[LAST_OFFSET] && !row[AFTER_GAP]) return 0;
    const byte *properties = record->properties, *entry = NULL;
    if (is_loaded(row, record->queue_offset) && (entry = entry_of(check, row, record->queue_offset)) == NULL) return 0;
    find_properties(properties, record->properties_size, &tags, &unique_key, &keys);
    if (!hash_bytes(properties + tags.at, tags.size, &code)) return 0;
    check->keys.count = 0;
    if (check->has_index) {
        if ((unique_key.size || keys.size)
            && (!hash_bytes(record->topic, record->topic_size, &start)
                || !add_keys(&check->keys, properties + unique_key.at, unique_key.size, properties + keys.at, keys.size,
                             31 * start + '#', record->physical_offset)))
            return 0;
        if (!is_indexed(&check->index, record, &check->keys)) return 0;
        pass_keys(&check->index, record, &check->keys);
    }
    if (is_first) row[RECORDS] = 0, row[FIRST_PHYSICAL] = record->physical_offset;
    row[RECORDS]++;
    row[LAST_OFFSET] = record->queue_offset;
    row[LAST_PHYSICAL] = record->physical_offset;
    row[AFTER_GAP] = 0;
    if (entry != NULL) {
        byte expected[ENTRY_SIZE];
        put64(put32(put64(expected, (uint64_t)record->physical_offset), (uint32_t)record->size),
              (uint64_t)(int64_t)(int32_t)code);
        if (!memcmp(expected, entry, ENTRY_SIZE)) {
            if (row[SEEN_FROM] == row[SEEN_TO]) row[SEEN_FROM] = row[SEEN_TO] = record->queue_offset;
            if (row[SEEN_TO] == record->queue_offset) row[SEEN_TO]++, row[SEEN_LAST] = record->physical_offset;
        }
    }
    return 1;
}

/* Read records ahead, so that what each of them touches is asked for before the first waits for it; how many. */
static int read_ahead(const Check *check, int64_t at, int64_t limit, Record *records, int64_t **rows) {
    int count = 0;
    while (count < AHEAD && read_record((byte *)check->bytes.buf + at, limit - at, 1, &records[count])) {
        Record *record = &records[count++];
        at += record->size;
        record->topic_hash = hash_topic(check->topics, record->topic, record->topic_size);
        fetch_topic(check->topics, record->topic_hash);
    }
    for (int n = 0; n < count; n++)
        if ((rows[n] = known_row(check, &records[n])) != NULL) fetch(rows[n]), fetch(rows[n] + NUMBERS - 1);
    for (int n = 0; n < count; n++)
        if (rows[n] != NULL && is_loaded(rows[n], records[n].queue_offset)) {
            const byte *entry = entry_of(check, rows[n], records[n].queue_offset);
            if (entry != NULL) fetch(entry);
        }
    return count;
}

/* mapping, slots, number of the next entry, number behind the last, begin timestamp, newest entry by slot, whether an entry
   was reached; an empty tuple behind the last file, None without an index */
static int take_place(PyObject *place, Check *check) {
    IndexPlace *index = &check->index;
    check->has_index = place != Py_None;
    if (!check->has_index) return 1;
    if (!PyTuple_CheckExact(place)) return 0;
    if (PyTuple_GET_SIZE(place) == 0) return 1;
    if (PyTuple_GET_SIZE(place) != 7 || !as_number(PyTuple_GET_ITEM(place, 1), 1, INT32_MAX, &index->slots)
        || !as_number(PyTuple_GET_ITEM(place, 2), 1, INT32_MAX, &index->number)
        || !as_number(PyTuple_GET_ITEM(place, 3), 1, INT32_MAX, &index->end)
        || !as_number(PyTuple_GET_ITEM(place, 4), INT64_MIN, INT64_MAX, &index->begin_timestamp)
        || !PyBool_Check(PyTuple_GET_ITEM(place, 6)))
        return 0;
    index->is_open = 1;
    index->is_reached = PyTuple_GET_ITEM(place, 6) == Py_True;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(place, 0), &index->memory, PyBUF_SIMPLE) < 0
        || PyObject_GetBuffer(PyTuple_GET_ITEM(place, 5), &index->newest, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    return index->newest.len / 4 >= index->slots && 40 + 4 * index->slots + ENTRY_SIZE * index->end <= index->memory.len;
}

/* bytes, at, limit, offset of the first byte, the rows by topic and id, the table in which they are remembered, rows,
   blocks, size of a block, index, store time of the record before
   -> at, records, offset and time of the last, number of the next entry of the index, the row of the queue of which other
      entries are wanted or None, and from which queue offset on */
PyObject *check_records(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t at, limit, start, records = 0, wanted = -1;
    Record ahead[AHEAD], last = {0};
    int64_t *rows[AHEAD];
    PyObject *result = NULL;
    Check *check = PyMem_Calloc(1, sizeof *check);
    if (check == NULL) return PyErr_NoMemory();
    if (count != 11 || !as_number(args[1], 0, INT64_MAX, &at) || !as_number(args[2], at, INT64_MAX, &limit)
        || !as_number(args[3], 0, INT64_MAX / 2, &start) || !PyDict_CheckExact(args[4])
        || !Py_IS_TYPE(args[5], &topic_table_type) || !as_number(args[8], ENTRY_SIZE, INT32_MAX, &check->block_size)
        || !as_number(args[10], INT64_MIN, INT64_MAX, &check->last_timestamp))
        goto end;
    check->queues = args[4], check->topics = (TopicTable *)args[5];
    if (PyObject_GetBuffer(args[0], &check->bytes, PyBUF_SIMPLE) < 0
        || PyObject_GetBuffer(args[7], &check->blocks, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        goto end;
    }
    if (!take_buffer(args[6], &check->rows) || !take_place(args[9], check) || limit > check->bytes.len) goto end;
    for (int is_over = 0; !is_over;) {
        int found = read_ahead(check, at, limit, ahead, rows);
        is_over = found < AHEAD;
        for (int n = 0; n < found; n++) {
            Record *record = &ahead[n];
            int64_t *row = rows[n] != NULL ? rows[n] : learn_row(check, record);
            record->physical_offset = start + at;
            if (row != NULL && wants_block(row, record->queue_offset)) {
                wanted = row - (int64_t *)check->rows.buf;
                last.queue_offset = record->queue_offset;
            }
            if (row == NULL || wanted >= 0 || !compare(check, record, row)) {
                is_over = 1;
                break;
            }
            at += record->size;
            records++;
            check->last_timestamp = record->store_timestamp;
            last = *record;
        }
    }
    if (!PyErr_Occurred() && (records > 0 || wanted >= 0))
        result = Py_BuildValue(
            "(LLLLLNL)", (long long)at, (long long)records, (long long)last.physical_offset,
            (long long)check->last_timestamp, (long long)check->index.number,
            wanted < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(wanted), (long long)last.queue_offset);
end:
    if (check->bytes.obj != NULL) PyBuffer_Release(&check->bytes);
    if (check->rows.obj != NULL) PyBuffer_Release(&check->rows);
    if (check->blocks.obj != NULL) PyBuffer_Release(&check->blocks);
    if (check->index.memory.obj != NULL) PyBuffer_Release(&check->index.memory);
    if (check->index.newest.obj != NULL) PyBuffer_Release(&check->index.newest);
    PyMem_Free(check->keys.keys);
    PyMem_Free(check);
    return result != NULL ? result : refuse();
}
