/* A piece of the log into queues and key index: store/log/walk.py, and store/dispatcher.py, replay.
 *
 * Goes from record to record and stops in front of the first unusual one, which is left to Python.
 */
#include "dispatching.h"
#include "properties.h"
#include "records.h"
#include "topic_table.h"

#define AHEAD 16         /* records that are read before the first of them is entered */
#define KNOWN_QUEUES 64  /* a power of two */

/* A queue whose new messages are told to Python, met before in this call. */
typedef struct {
    const int64_t *row;
    PyObject *topic_name, *sizes;
    int is_watched;
} Queue;

typedef struct {
    PyObject *queues, *by_row, *sizes, *watched, *grown;
    TopicTable *topics;
    Py_buffer rows, memory;
    Queue known[KNOWN_QUEUES];
    Keys keys;
    Index index;
    int64_t indexed_up_to;
    int has_index, has_place;
} Replay;

/* Look the queue of a record up as Dispatcher.replay does, and remember its row; NULL when it is not known, or special. */
static int64_t *learn_row(Replay *replay, const Record *record) {
    PyObject *key = Py_BuildValue("(y#i)", record->topic, record->topic_size, (int)record->queue_id);
    PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(replay->queues, key);
    Py_XDECREF(key);
    if (state == NULL || state == Py_None) return NULL;
    Py_INCREF(state);
    PyObject *number = attribute(state, s_row), *is_special = attribute(state, s_is_special);
    int64_t row = -1, *found = NULL;
    if (is_special == Py_False && as_number(number, 0, INT64_MAX, &row)) found = row_at(&replay->rows, row);
    Py_DECREF(state);
    Py_XDECREF(number);
    Py_XDECREF(is_special);
    if (found != NULL && !keep_row(replay->topics, record->topic_hash, record->topic, record->topic_size,
                                   record->queue_id, row) && PyErr_Occurred())
        return NULL;
    return found;
}

/* The row that the table knows; NULL when it knows none. */
static int64_t *known_row(const Replay *replay, const Record *record) {
    Destination to;
    if (!find_topic(replay->topics, record->topic_hash, record->topic, record->topic_size, &to)) return NULL;
    return row_at(&replay->rows, row_of_queue(&to, record->queue_id));
}

static void forget_queue(Queue *queue) {
    Py_CLEAR(queue->topic_name);
    Py_CLEAR(queue->sizes);
    queue->row = NULL;
}

/* The queue of a row; NULL with an exception, or when no queue has this row. */
static Queue *queue_of(Replay *replay, const int64_t *row, const Record *record) {
    Py_ssize_t number = (row - (int64_t *)replay->rows.buf) / ROW;
    Queue *queue = &replay->known[number % KNOWN_QUEUES];
    if (queue->row == row) return queue;
    forget_queue(queue);
    if (number >= PyList_GET_SIZE(replay->by_row)) return NULL;
    PyObject *topic = attribute(PyList_GET_ITEM(replay->by_row, number), s_topic);
    if (topic == NULL || !PyUnicode_CheckExact(topic)) {
        Py_XDECREF(topic);
        return NULL;
    }
    queue->topic_name = topic;
    queue->is_watched = 1;
    if (replay->watched != Py_None) {
        PyObject *key = Py_BuildValue("(Oi)", topic, (int)record->queue_id);
        queue->is_watched = key == NULL ? -1 : PyDict_Contains(replay->watched, key);
        Py_XDECREF(key);
        if (queue->is_watched < 0) return NULL;
    }
    queue->row = row;
    return queue;
}

static int64_t seconds_at(const Index *index, int64_t store_timestamp) {
    if (index->begin_timestamp <= 0 || store_timestamp < index->begin_timestamp) return 0;
    int64_t seconds = (store_timestamp - index->begin_timestamp) / 1000;
    return seconds > INT32_MAX ? INT32_MAX : seconds;
}

/* Enter one record into the index, and into its queue if `row` is one; 0, and nothing was done, when it is unusual. */
static int enter(Replay *replay, const Record *record, int64_t *row) {
    int64_t physical_end = record->physical_offset + record->size, at = 0;
    int is_new = row != NULL && physical_end > row[PHYSICAL_END];
    if (row != NULL && !is_new && record->physical_offset < replay->indexed_up_to) return 1;
    if (is_new) {
        at = row[AT];
        if (row[SPILL_AT] <= 0 || row[END] < 0 || row[END] % ENTRY_SIZE || row[END] / ENTRY_SIZE != record->queue_offset
            || row[END] > INT64_MAX - ENTRY_SIZE || !is_place(at, replay->memory.len)
            || (record->queue_offset == 0 && row[PHYSICAL_END] > 0))
            return 0;
    }
    const byte *properties = record->properties;
    Part tags, unique_key, keys;
    uint32_t code = 0;
    find_properties(properties, record->properties_size, &tags, &unique_key, &keys);
    if (is_new && !hash_bytes(properties + tags.at, tags.size, &code)) return 0;
    replay->keys.count = 0;
    if (replay->has_index && (unique_key.size || keys.size)) {
        const Index *index = &replay->index;
        uint32_t start = 0;
        if (!replay->has_place || index->next_entry >= index->limit) return 0;
        if (record->physical_offset >= index->end_offset
            && (!hash_bytes(record->topic, record->topic_size, &start)
                || !add_keys(&replay->keys, properties + unique_key.at, unique_key.size, properties + keys.at, keys.size,
                             31 * start + '#', record->physical_offset)
                || replay->keys.count > index->limit - index->next_entry))
            return 0;
    }
    if (is_new) {
        if (at % BLOCK == 0 && (at = take_block(&replay->memory, at)) == 0) return 0;
        byte *to = put64((byte *)replay->memory.buf + at, (uint64_t)record->physical_offset);
        put64(put32(to, (uint32_t)record->size), (uint64_t)(int64_t)(int32_t)code);
        row[END] += ENTRY_SIZE;
        row[PHYSICAL_END] = physical_end;
        row[AT] = at + ENTRY_SIZE;
    }
    if (row != NULL && row[NEXT] < row[END] / ENTRY_SIZE) row[NEXT] = row[END] / ENTRY_SIZE;
    if (replay->keys.count > 0) {
        put_keys(&replay->index, &replay->keys, seconds_at(&replay->index, record->store_timestamp));
        replay->index.end_timestamp = record->store_timestamp;
    }
    return 1;
}

/* Add the size of a record to the sizes of its queue. */
static int note_size(const Replay *replay, const Record *record, Queue *queue) {
    if (queue->sizes == NULL) {
        PyObject *key = Py_BuildValue("(Oi)", queue->topic_name, (int)record->queue_id);
        if (key == NULL) return 0;
        PyObject *known = PyDict_GetItemWithError(replay->sizes, key);
        if (known != NULL) Py_INCREF(known);
        else if (!PyErr_Occurred() && (known = PyList_New(0)) != NULL && PyDict_SetItem(replay->sizes, key, known) < 0)
            Py_CLEAR(known);
        Py_DECREF(key);
        if (known == NULL) return 0;
        queue->sizes = known;
    }
    PyObject *size = PyLong_FromLongLong(record->size);
    int is_noted = size != NULL && PyList_Append(queue->sizes, size) == 0;
    Py_XDECREF(size);
    return is_noted;
}

/* Add a record to the messages of watched queues. */
static int tell(const Replay *replay, const Record *record, const Queue *queue) {
    PyObject *one = Py_BuildValue(
        "(OiLy#Li)", queue->topic_name, (int)record->queue_id, (long long)record->queue_offset, record->properties,
        record->properties_size, (long long)record->store_timestamp, (int)record->size);
    int is_told = one != NULL && PyList_Append(replay->grown, one) == 0;
    Py_XDECREF(one);
    return is_told;
}

/* memory, slots, next entry, limit, used slots, begin timestamp, end offset, end timestamp; an empty tuple when it is not
   known where the next key goes, None without an index */
static int take_index(PyObject *place, Replay *replay) {
    Index *index = &replay->index;
    replay->has_index = place != Py_None;
    if (!replay->has_index) return 1;
    if (!PyTuple_CheckExact(place)) return 0;
    if (PyTuple_GET_SIZE(place) == 0) return 1;
    if (PyTuple_GET_SIZE(place) != 8 || !as_number(PyTuple_GET_ITEM(place, 1), 1, INT32_MAX, &index->slots)
        || !as_number(PyTuple_GET_ITEM(place, 2), 2, INT32_MAX, &index->next_entry)
        || !as_number(PyTuple_GET_ITEM(place, 3), 0, INT32_MAX, &index->limit)
        || !as_number(PyTuple_GET_ITEM(place, 4), 0, INT32_MAX, &index->used_slots)
        || !as_number(PyTuple_GET_ITEM(place, 5), INT64_MIN, INT64_MAX, &index->begin_timestamp)
        || !as_number(PyTuple_GET_ITEM(place, 6), INT64_MIN, INT64_MAX, &index->end_offset)
        || !as_number(PyTuple_GET_ITEM(place, 7), INT64_MIN, INT64_MAX, &index->end_timestamp))
        return 0;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(place, 0), &index->memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    replay->has_place = is_index(index);
    return replay->has_place;
}

static int take_buffers(PyObject *const *args, Py_buffer *bytes, Replay *replay) {
    if (PyObject_GetBuffer(args[0], bytes, PyBUF_SIMPLE) < 0 || !take_buffer(args[10], &replay->rows)
        || !take_buffer(args[11], &replay->memory)) {
        PyErr_Clear();
        return 0;
    }
    return replay->memory.len >= BLOCK && take_index(args[12], replay);
}

static int is_dict_or_none(PyObject *object) { return object == Py_None || PyDict_CheckExact(object); }

/* Read records ahead, so that what each of them touches is asked for before the first waits for it; how many. */
static int read_ahead(const Replay *replay, const byte *at, Py_ssize_t left, int check_crc, Record *records) {
    int count = 0;
    while (count < AHEAD && read_record(at, left, &records[count]) && !(records[count].sys_flag & NOT_IN_A_QUEUE)
           && (!check_crc || has_right_checksum(&records[count]))) {
        Record *record = &records[count++];
        at += record->size, left -= record->size;
        if (replay->queues == Py_None) continue;
        record->topic_hash = hash_topic(replay->topics, record->topic, record->topic_size);
        fetch_topic(replay->topics, record->topic_hash);
    }
    return count;
}

static void find_rows(const Replay *replay, const Record *records, int64_t **rows, int count) {
    for (int n = 0; n < count; n++) {
        rows[n] = replay->queues == Py_None ? NULL : known_row(replay, &records[n]);
        if (rows[n] != NULL) fetch(rows[n]);
    }
    for (int n = 0; n < count; n++)
        if (rows[n] != NULL && rows[n][AT] > 0 && rows[n][AT] < replay->memory.len)
            fetch((byte *)replay->memory.buf + rows[n][AT]);
}

/* Tell of a record that was entered; 0 with an exception. */
static int hear(Replay *replay, const Record *record, const int64_t *row) {
    Queue *queue = queue_of(replay, row, record);
    if (queue == NULL) return !PyErr_Occurred();
    return (replay->sizes == Py_None || note_size(replay, record, queue))
        && (!queue->is_watched || tell(replay, record, queue));
}

/* bytes, at, limit, offset of the first byte, check the CRC, queues by topic and id (None: the index only), the table in
   which their rows are remembered, queues by row, the sizes by queue that are added to (None: nobody wants them), watched
   queues (None: all), rows, memory, index, offset up to which all is indexed
   -> at, records, offset and time of the last, the row of the queue to be written now or None, what those who watch are
      told, next entry, used slots, end offset and end time of the index */
PyObject *replay_records(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t at, limit, start, records = 0, full = -1;
    Py_buffer bytes = {0};
    Record ahead[AHEAD], last = {0};
    int64_t *rows[AHEAD];
    PyObject *result = NULL;
    if (count != 14 || !PyBool_Check(args[4]) || !is_dict_or_none(args[5]) || !Py_IS_TYPE(args[6], &topic_table_type)
        || !PyList_CheckExact(args[7]) || !is_dict_or_none(args[8]) || !is_dict_or_none(args[9])
        || !as_number(args[1], 0, INT64_MAX, &at) || !as_number(args[2], at, INT64_MAX, &limit)
        || !as_number(args[3], 0, INT64_MAX / 2, &start))
        return refuse();
    Replay *replay = PyMem_Calloc(1, sizeof *replay);
    if (replay == NULL) return PyErr_NoMemory();
    replay->queues = args[5], replay->topics = (TopicTable *)args[6], replay->by_row = args[7];
    replay->sizes = args[8], replay->watched = args[9], replay->grown = PyList_New(0);
    int is_heard = replay->sizes != Py_None || replay->watched == Py_None || PyDict_GET_SIZE(replay->watched) > 0;
    if (replay->grown == NULL || !as_number(args[13], 0, INT64_MAX, &replay->indexed_up_to)
        || !take_buffers(args, &bytes, replay) || limit > bytes.len)
        goto end;
    for (int is_over = 0; !is_over;) {
        int found = read_ahead(replay, (byte *)bytes.buf + at, limit - at, args[4] == Py_True, ahead);
        find_rows(replay, ahead, rows, found);
        is_over = found < AHEAD;
        for (int n = 0; n < found; n++) {
            Record *record = &ahead[n];
            int64_t *row = rows[n];
            record->physical_offset = start + at;
            is_over = 1; /* unless it is entered, and nothing has to be done before the next one */
            if (replay->queues != Py_None && row == NULL && (row = learn_row(replay, record)) == NULL) break;
            if (!enter(replay, record, row)) break;
            at += record->size;
            records++;
            last = *record;
            if (row != NULL) {
                if (row[PHYSICAL_END] == start + at && row[SPILL_AT] > 0 && row[END] >= row[SPILL_AT])
                    full = row - (int64_t *)replay->rows.buf;
                if (is_heard && !hear(replay, record, row)) break;
                if (full >= 0) break;
            }
            is_over = found < AHEAD;
        }
    }
    if (!PyErr_Occurred() && records > 0)
        result = Py_BuildValue(
            "(LLLLNOLLLL)", (long long)at, (long long)records, (long long)last.physical_offset,
            (long long)last.store_timestamp, full < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(full), replay->grown,
            (long long)replay->index.next_entry, (long long)replay->index.used_slots,
            (long long)replay->index.end_offset, (long long)replay->index.end_timestamp);
end:
    for (int n = 0; n < KNOWN_QUEUES; n++) forget_queue(&replay->known[n]);
    if (bytes.obj != NULL) PyBuffer_Release(&bytes);
    if (replay->rows.obj != NULL) PyBuffer_Release(&replay->rows);
    if (replay->memory.obj != NULL) PyBuffer_Release(&replay->memory);
    if (replay->index.memory.obj != NULL) PyBuffer_Release(&replay->index.memory);
    PyMem_Free(replay->keys.keys);
    Py_XDECREF(replay->grown);
    PyMem_Free(replay);
    return result != NULL ? result : refuse();
}
