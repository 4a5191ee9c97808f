/* A piece of the log into queues and key index: store/walk.py, and store/dispatcher.py, replay.
 *
 * Goes from record to record and stops in front of the first one that is not usual, which its twin then looks at.
 */
#include "dispatching.h"
#include "properties.h"

#define MAGIC_V1 0xDAA320A7u
#define HEAD_SIZE 88 /* all that precedes the body, when both hosts are IPv4 */
#define SMALLEST_RECORD 91
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32
#define IPV6_EXTRA 12
#define NOT_IN_A_QUEUE 4
#define KNOWN_QUEUES 64 /* a power of two */

typedef struct {
    int64_t size, physical_offset, queue_offset, store_timestamp;
    uint32_t sys_flag;
    int32_t queue_id;
    const byte *topic, *properties;
    Py_ssize_t topic_size, properties_size;
} Record;

/* A queue that was met before in this call. */
typedef struct {
    const byte *topic; /* in the log */
    Py_ssize_t topic_size;
    PyObject *state, *topic_name, *sizes;
    int64_t *row;
    int32_t queue_id;
    uint32_t hash; /* of the topic and a '#' */
    int is_watched;
} Queue;

typedef struct {
    PyObject *queues, *sizes, *watched, *grown;
    Py_buffer rows, memory;
    Queue known[KNOWN_QUEUES];
    Keys keys;
    Index index;
    int64_t indexed_up_to;
    int has_index, has_place;
} Replay;

/* The record at `at`, of which `left` bytes are there; 0 when it is not whole, not sound, or not the usual one. */
static int read_record(const byte *at, Py_ssize_t left, int check_crc, Record *record) {
    if (left < SMALLEST_RECORD || get32(at + 4) != MAGIC_V1) return 0;
    int64_t size = get32(at);
    uint32_t sys_flag = get32(at + 36);
    if (size < SMALLEST_RECORD || size > INT32_MAX || size > left || sys_flag & NOT_IN_A_QUEUE) return 0;
    int64_t timestamp_at = 56, body_at = HEAD_SIZE;
    if (sys_flag & BORN_HOST_V6) timestamp_at += IPV6_EXTRA, body_at += IPV6_EXTRA;
    if (sys_flag & STORE_HOST_V6) body_at += IPV6_EXTRA;
    if (body_at > size) return 0;
    int64_t body_size = (int32_t)get32(at + body_at - 4);
    int64_t topic_at = body_at + body_size + 1;
    if (body_size < 0 || topic_at + 2 > size) return 0;
    int64_t properties_at = topic_at + at[topic_at - 1] + 2;
    if (properties_at > size || (at[properties_at - 2] << 8 | at[properties_at - 1]) != size - properties_at) return 0;
    if (check_crc && (crc32_of(at + body_at, (Py_ssize_t)body_size) & 0x7FFFFFFF) != get32(at + 8)) return 0;
    record->size = size;
    record->queue_id = (int32_t)get32(at + 12);
    record->queue_offset = (int64_t)get64(at + 20);
    record->sys_flag = sys_flag;
    record->store_timestamp = (int64_t)get64(at + timestamp_at);
    record->topic = at + topic_at, record->topic_size = (Py_ssize_t)(properties_at - 2 - topic_at);
    record->properties = at + properties_at, record->properties_size = (Py_ssize_t)(size - properties_at);
    return 1;
}

static void forget_queue(Queue *queue) {
    Py_CLEAR(queue->state);
    Py_CLEAR(queue->topic_name);
    Py_CLEAR(queue->sizes);
    queue->topic = NULL;
}

/* Learn about the queue of a record; 0 when it is not known, or special. */
static int learn_queue(Replay *replay, const Record *record, Queue *queue) {
    int is_learnt = 0;
    forget_queue(queue);
    queue->hash = 0;
    if (!hash_bytes(record->topic, record->topic_size, &queue->hash)) return 0;
    queue->hash = 31 * queue->hash + '#';
    queue->row = NULL;
    queue->is_watched = 0;
    if (replay->queues != Py_None) {
        PyObject *key = Py_BuildValue("(y#i)", record->topic, record->topic_size, (int)record->queue_id);
        PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(replay->queues, key);
        Py_XDECREF(key);
        if (state == NULL || state == Py_None) return 0;
        Py_INCREF(queue->state = state);
        PyObject *row = attribute(state, s_row), *is_special = attribute(state, s_is_special);
        queue->topic_name = attribute(state, s_topic);
        int64_t number;
        queue->row = as_number(row, 0, INT64_MAX, &number) ? row_at(&replay->rows, number) : NULL;
        is_learnt = queue->row != NULL && is_special == Py_False && queue->topic_name != NULL
            && PyUnicode_CheckExact(queue->topic_name);
        Py_XDECREF(row);
        Py_XDECREF(is_special);
        if (is_learnt && replay->watched != Py_None) {
            key = Py_BuildValue("(Oi)", queue->topic_name, (int)record->queue_id);
            queue->is_watched = key == NULL ? -1 : PyDict_Contains(replay->watched, key);
            Py_XDECREF(key);
        } else queue->is_watched = is_learnt;
        if (!is_learnt || queue->is_watched < 0) {
            forget_queue(queue);
            return 0;
        }
    }
    queue->topic = record->topic, queue->topic_size = record->topic_size;
    queue->queue_id = record->queue_id;
    return 1;
}

static Queue *queue_of(Replay *replay, const Record *record) {
    uint32_t at = (uint32_t)record->queue_id + 7 * (uint32_t)record->topic_size;
    for (Py_ssize_t n = record->topic_size; n > 0 && n > record->topic_size - 8; n--) at = 31 * at + record->topic[n - 1];
    Queue *queue = &replay->known[at % KNOWN_QUEUES];
    if (queue->topic != NULL && queue->queue_id == record->queue_id && queue->topic_size == record->topic_size
        && memcmp(queue->topic, record->topic, (size_t)record->topic_size) == 0)
        return queue;
    return learn_queue(replay, record, queue) ? queue : NULL;
}

static int64_t seconds_at(const Index *index, int64_t store_timestamp) {
    if (index->begin_timestamp <= 0 || store_timestamp < index->begin_timestamp) return 0;
    int64_t seconds = (store_timestamp - index->begin_timestamp) / 1000;
    return seconds > INT32_MAX ? INT32_MAX : seconds;
}

/* Enter one record; 0, and nothing was done, when its twin has to. */
static int enter(Replay *replay, const Record *record, Queue **entered) {
    Queue *queue = *entered = queue_of(replay, record);
    if (queue == NULL) return 0;
    int64_t *row = queue->row;
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
        if (!replay->has_place || index->next_entry >= index->limit) return 0;
        if (record->physical_offset >= index->end_offset
            && (!add_keys(&replay->keys, properties + unique_key.at, unique_key.size, properties + keys.at, keys.size,
                          queue->hash, record->physical_offset)
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

/* Note the size of a record among those of its queue. */
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

/* Tell of a record whose queue somebody watches. */
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
    if (PyObject_GetBuffer(args[0], bytes, PyBUF_SIMPLE) < 0 || !take_buffer(args[8], &replay->rows)
        || !take_buffer(args[9], &replay->memory)) {
        PyErr_Clear();
        return 0;
    }
    return replay->memory.len >= BLOCK && take_index(args[10], replay);
}

static int is_dict_or_none(PyObject *object) { return object == Py_None || PyDict_CheckExact(object); }

/* bytes, at, limit, offset of the first byte, check the CRC, queues by topic and id (None: the index only),
   the sizes by queue that are added to (None: nobody wants them), watched queues (None: all), rows, memory, index,
   offset up to which all is indexed
   -> at, records, offset and time of the last, the queue to be written now or None, what those who watch are told,
      next entry, used slots, end offset and end time of the index */
PyObject *replay_records(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t at, limit, start, records = 0;
    Py_buffer bytes = {0};
    Record record = {0}, last = {0};
    PyObject *full = Py_None, *result = NULL;
    if (count != 12 || !PyBool_Check(args[4]) || !is_dict_or_none(args[5]) || !is_dict_or_none(args[6])
        || !is_dict_or_none(args[7]) || !as_number(args[1], 0, INT64_MAX, &at)
        || !as_number(args[2], at, INT64_MAX, &limit) || !as_number(args[3], 0, INT64_MAX / 2, &start))
        return refuse();
    Replay *replay = PyMem_Calloc(1, sizeof *replay);
    if (replay == NULL) return PyErr_NoMemory();
    replay->queues = args[5], replay->sizes = args[6], replay->watched = args[7], replay->grown = PyList_New(0);
    if (replay->grown == NULL || !as_number(args[11], 0, INT64_MAX, &replay->indexed_up_to)
        || !take_buffers(args, &bytes, replay) || limit > bytes.len)
        goto end;
    while (full == Py_None && read_record((byte *)bytes.buf + at, limit - at, args[4] == Py_True, &record)) {
        Queue *queue;
        record.physical_offset = start + at;
        if (!enter(replay, &record, &queue)) break;
        at += record.size;
        records++;
        last = record;
        if (queue->row == NULL) continue;
        if (queue->row[PHYSICAL_END] == start + at && queue->row[SPILL_AT] > 0
            && queue->row[END] >= queue->row[SPILL_AT])
            full = queue->state;
        if (replay->sizes != Py_None && !note_size(replay, &record, queue)) break;
        if (queue->is_watched && !tell(replay, &record, queue)) break;
    }
    if (!PyErr_Occurred() && records > 0)
        result = Py_BuildValue(
            "(LLLLOOLLLL)", (long long)at, (long long)records, (long long)last.physical_offset,
            (long long)last.store_timestamp, full, replay->grown, (long long)replay->index.next_entry,
            (long long)replay->index.used_slots, (long long)replay->index.end_offset,
            (long long)replay->index.end_timestamp);
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
