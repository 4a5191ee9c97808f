/* Pops: cut_pops of protocol/bodies/pop_frames.py, take_unread of store/queue/unread.py, encode_pops of
   broker/pop/pop_reply.py, offset_list of protocol/bodies/pop.py. */
#include "queue_tails.h"

#define MOST_QUEUES 64
#define MOST_BITS 63
#define MOST_DIGITS 18

static PyObject *s_retry_flag, *s_start_offset, *s_bits, *s_records, *s_queue, *s_byte_count;
static PyObject *s_request, *s_queues, *s_pop_time, *s_invisible_millis, *s_revive_queue, *s_rest;

/* --- cut_pops --- */

static const char OPAQUE[] = "\"opaque\":", BORN[] = "\"bornTime\":\"", POP_START[] = "{\"code\":200050,";

/* Where a text begins, from `at` on; NULL when it is not there. */
static const byte *find(const byte *at, const byte *end, const char *text) {
    size_t size = strlen(text);
    while (at < end && (at = memchr(at, text[0], (size_t)(end - at))) != NULL) {
        if ((size_t)(end - at) < size) return NULL;
        if (!memcmp(at, text, size)) return at;
        at++;
    }
    return NULL;
}

/* The digits from `*at` on, which moves behind them; 0 unless there are some, and not too many. */
static int cut_number(const byte **at, const byte *end, int most, int64_t *number) {
    int digits = 0;
    *number = 0;
    for (; *at < end && **at >= '0' && **at <= '9'; ++*at, digits++) {
        if (digits == most) return 0;
        *number = *number * 10 + (**at - '0');
    }
    return digits > 0;
}

/* A header, and where its two numbers stand; without bornTime that number is empty and stands at the start. */
typedef struct {
    const byte *start, *born_at, *born_end, *opaque_at, *opaque_end, *end;
    int64_t born, opaque;
} Cut;

/* 0 for a header that is written in an unusual way, or is something else. */
static int cut_header(PyObject *frame, Cut *cut) {
    int64_t kind;
    size_t known = strlen(POP_START);
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3
        || !as_number(PyTuple_GET_ITEM(frame, 0), 0, 0, &kind) || !PyBytes_CheckExact(PyTuple_GET_ITEM(frame, 1)))
        return 0;
    PyObject *header = PyTuple_GET_ITEM(frame, 1);
    const byte *start = (const byte *)PyBytes_AS_STRING(header), *end = start + PyBytes_GET_SIZE(header);
    if ((size_t)(end - start) < known || memcmp(start, POP_START, known)) return 0;
    const byte *at = find(start, end, BORN);
    cut->start = start, cut->end = end, cut->born = 0;
    cut->born_end = cut->born_at = at == NULL ? start : at + strlen(BORN);
    if (at != NULL && (!cut_number(&cut->born_end, end, MOST_DIGITS, &cut->born) || cut->born_end >= end || *cut->born_end != '"'))
        return 0;
    cut->opaque_at = find(cut->born_end, end, OPAQUE);
    if (cut->opaque_at == NULL) return 0;
    cut->opaque_end = cut->opaque_at += strlen(OPAQUE);
    return cut_number(&cut->opaque_end, end, 9, &cut->opaque) && cut->opaque_end < end && *cut->opaque_end == ',';
}

static int is_same_part(const byte *one, const byte *one_end, const byte *other, const byte *other_end) {
    return one_end - one == other_end - other && !memcmp(one, other, (size_t)(one_end - one));
}

static int is_same_text_around(const Cut *one, const Cut *other) {
    return is_same_part(one->start, one->born_at, other->start, other->born_at)
           && is_same_part(one->born_end, one->opaque_at, other->born_end, other->opaque_at)
           && is_same_part(one->opaque_end, one->end, other->opaque_end, other->end);
}

static PyObject *text_around(const Cut *cut) {
    Py_ssize_t numbers = (cut->born_end - cut->born_at) + (cut->opaque_end - cut->opaque_at);
    PyObject *text = PyBytes_FromStringAndSize(NULL, (cut->end - cut->start) - numbers);
    if (text == NULL) return NULL;
    byte *to = put_bytes((byte *)PyBytes_AS_STRING(text), cut->start, cut->born_at - cut->start);
    put_bytes(put_bytes(to, cut->born_end, cut->opaque_at - cut->born_end), cut->opaque_end, cut->end - cut->opaque_end);
    return text;
}

static int append_number(PyObject *list, int64_t number) {
    PyObject *one = PyLong_FromLongLong(number);
    int is_added = one != NULL && PyList_Append(list, one) == 0;
    Py_XDECREF(one);
    return is_added;
}

/* frames, at, stop -> position of the first frame that was not cut, text without two numbers, opaques, born times */
PyObject *cut_pops(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, stop;
    if (count != 3 || !PyList_CheckExact(args[0]) || !as_number(args[2], 0, PyList_GET_SIZE(args[0]), &stop)
        || !as_number(args[1], 0, stop, &at))
        return wrong_arguments("cut_pops");
    Cut first = {0}, cut;
    PyObject *text = NULL, *opaques = PyList_New(0), *borns = PyList_New(0);
    int is_good = opaques != NULL && borns != NULL;
    for (; is_good && at < stop && cut_header(PyList_GET_ITEM(args[0], at), &cut); at++) {
        if (text == NULL) {
            first = cut;
            is_good = (text = text_around(&cut)) != NULL;
        } else if (!is_same_text_around(&first, &cut)) break;
        is_good = is_good && append_number(opaques, cut.opaque) && append_number(borns, cut.born);
    }
    if (is_good && text == NULL) is_good = (text = PyBytes_FromStringAndSize(NULL, 0)) != NULL;
    if (is_good) return Py_BuildValue("(LNNN)", (long long)at, text, opaques, borns);
    Py_XDECREF(text);
    Py_XDECREF(opaques);
    Py_XDECREF(borns);
    return NULL;
}

/* --- take_unread --- */

/* A queue of the topic. */
typedef struct {
    PyObject *number, *state; /* owned */
    const int64_t *row;
    int64_t offset; /* of the group */
    int is_moved;
} Place;

/* What all queues are read with. */
typedef struct {
    Place *places;
    int64_t count;
    Py_buffer rows, memory;
    int64_t least, end, most_bytes; /* records lie in the log from `least` to `end` */
} Unread;

/* 0 for a queue or an offset that is missing, perhaps with an exception. */
static int open_place(const Unread *of, PyObject *states, PyObject *topic, PyObject *offsets, int64_t queue_id, Place *place) {
    int64_t row;
    place->number = PyLong_FromLongLong(queue_id);
    PyObject *key = place->number == NULL ? NULL : PyTuple_Pack(2, topic, place->number);
    PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(states, key);
    PyObject *offset = state == NULL ? NULL : PyDict_GetItemWithError(offsets, place->number);
    Py_XDECREF(key);
    if (offset == NULL || !as_number(offset, 0, INT64_MAX / ENTRY_SIZE, &place->offset)) return 0;
    place->state = Py_NewRef(state);
    PyObject *value = PyObject_GetAttr(state, s_row);
    if (value != NULL && as_number(value, 0, INT64_MAX, &row)) place->row = row_at(&of->rows, row);
    Py_XDECREF(value);
    return place->row != NULL;
}

/* Copy entries from one logical byte to another, block by block from the last one on; 0 unless all are in memory. */
static int copy_entries(const Unread *of, const int64_t *row, int64_t position, int64_t stop, byte *to) {
    int64_t at = row[AT], block = (at - 1) & -(int64_t)BLOCK, begin = row[END] - (at - block - FIRST);
    if (at <= BLOCK || position < row[START]) return 0;
    for (;;) {
        if (block < BLOCK || block > of->memory.len - BLOCK) return 0;
        int64_t first = begin > position ? begin : position;
        int64_t last = begin + BLOCK - FIRST < stop ? begin + BLOCK - FIRST : stop;
        const byte *from = (const byte *)of->memory.buf + block;
        if (last > first) put_bytes(to + (first - position), from + FIRST + (first - begin), last - first);
        if (begin <= position) return 1;
        block = get_native(from), begin -= BLOCK - FIRST;
    }
}

/* The bytes of the records that entries point to; -1 when not all lie in the part of the log that is read. */
static int64_t bytes_of(const Unread *of, PyObject *entries) {
    int64_t total = 0;
    const byte *at = (const byte *)PyBytes_AS_STRING(entries), *stop = at + PyBytes_GET_SIZE(entries);
    if ((stop - at) % ENTRY_SIZE) return -1;
    for (; at < stop; at += ENTRY_SIZE) {
        int64_t offset = get64(at), size = get32(at + 8);
        if (offset < of->least || offset > of->end || size > of->end - offset) return -1;
        total += size;
    }
    return total > of->most_bytes || total == 0 ? -1 : total;
}

/* Entries by the method `read` of the queue, which reads files. */
static PyObject *read_queue(const Place *place, int64_t count) {
    PyObject *queue = PyObject_GetAttr(place->state, s_queue);
    PyObject *entries = queue == NULL ? NULL : PyObject_CallMethod(queue, "read", "LL", (long long)place->offset, (long long)count);
    Py_XDECREF(queue);
    if (entries == NULL || PyBytes_CheckExact(entries)) return entries;
    Py_DECREF(entries);
    PyErr_SetString(PyExc_TypeError, "take_unread: entries are bytes");
    return NULL;
}

/* The first entries behind the offset, at most so many; NULL when they are unusual, perhaps with an exception. */
static PyObject *read_entries(const Unread *of, const Place *place, int64_t count, int64_t *byte_count) {
    PyObject *entries = NULL;
    int64_t position = place->offset * ENTRY_SIZE;
    if (count > 0 && position >= place->row[START]) {
        entries = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * ENTRY_SIZE);
        byte *to = entries == NULL ? NULL : (byte *)PyBytes_AS_STRING(entries);
        if (to != NULL && !copy_entries(of, place->row, position, position + count * ENTRY_SIZE, to)) Py_CLEAR(entries);
    } else if (count > 0) entries = read_queue(place, count);
    if (entries != NULL && (*byte_count = bytes_of(of, entries)) < 0) Py_CLEAR(entries);
    return entries;
}

/* Take what one reader gets who begins with this queue; NULL, perhaps without an exception. */
static PyObject *take_turn(Unread *of, int64_t first, int64_t most) {
    int64_t left = 0;
    PyObject *taken = PyList_New(0);
    for (int64_t n = first; taken != NULL && n < first + of->count; n++) {
        Place *place = &of->places[n % of->count];
        int64_t byte_count, unread = place->row[END] / ENTRY_SIZE - place->offset;
        if (unread != 0 && most > 0) {
            PyObject *entries = read_entries(of, place, unread < most ? unread : most, &byte_count);
            Py_ssize_t count = entries == NULL ? 0 : PyBytes_GET_SIZE(entries) / ENTRY_SIZE;
            PyObject *one = entries == NULL ? NULL : Py_BuildValue("(OLNL)", place->number, (long long)place->offset, entries, (long long)byte_count);
            if (one == NULL || PyList_Append(taken, one) < 0) Py_CLEAR(taken);
            Py_XDECREF(one);
            most -= count, unread -= count;
        }
        if (unread > 0) left += unread;
    }
    return taken == NULL ? NULL : Py_BuildValue("(LN)", (long long)left, taken);
}

/* Let the places follow what one reader took. */
static void move_places(Unread *of, PyObject *turn) {
    PyObject *taken = PyTuple_GET_ITEM(turn, 1);
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(taken); n++) {
        PyObject *one = PyList_GET_ITEM(taken, n);
        Place *place = of->places;
        while (place->number != PyTuple_GET_ITEM(one, 0)) place++;
        place->offset += PyBytes_GET_SIZE(PyTuple_GET_ITEM(one, 2)) / ENTRY_SIZE;
        place->is_moved = 1;
    }
}

static int save_offsets(const Unread *of, PyObject *offsets) {
    for (const Place *place = of->places; place < of->places + of->count; place++) {
        PyObject *offset = place->is_moved ? PyLong_FromLongLong(place->offset) : NULL;
        if (place->is_moved && (offset == NULL || PyDict_SetItem(offsets, place->number, offset) < 0)) {
            Py_XDECREF(offset);
            return 0;
        }
        Py_XDECREF(offset);
    }
    return 1;
}

/* states, rows, memory, topic, queues, offsets, (first queue, readers), most, (least, end, most bytes) -> for each reader
   entries that are left, and (queue id, offset, entries, bytes of records) of each queue that gave some */
PyObject *take_unread(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t first, readers, most;
    Place few[MOST_QUEUES];
    Unread of = {0};
    if (count != 9 || !PyDict_Check(args[0]) || !PyUnicode_CheckExact(args[3]) || !PyDict_Check(args[5])
        || !as_number(args[4], 0, INT32_MAX, &of.count) || !PyTuple_CheckExact(args[6]) || PyTuple_GET_SIZE(args[6]) != 2
        || !as_number(PyTuple_GET_ITEM(args[6], 0), 0, INT32_MAX, &first)
        || !as_number(PyTuple_GET_ITEM(args[6], 1), 0, INT32_MAX, &readers)
        || !as_number(args[7], 0, INT32_MAX, &most) || !PyTuple_CheckExact(args[8]) || PyTuple_GET_SIZE(args[8]) != 3
        || !as_number(PyTuple_GET_ITEM(args[8], 0), 0, INT64_MAX, &of.least)
        || !as_number(PyTuple_GET_ITEM(args[8], 1), 0, INT64_MAX, &of.end)
        || !as_number(PyTuple_GET_ITEM(args[8], 2), 0, INT64_MAX, &of.most_bytes))
        return wrong_arguments("take_unread");
    if (!take_buffer(args[1], &of.rows) || !take_buffer(args[2], &of.memory)) {
        if (of.rows.obj != NULL) PyBuffer_Release(&of.rows);
        if (of.memory.obj != NULL) PyBuffer_Release(&of.memory);
        return wrong_arguments("take_unread");
    }
    of.places = of.count <= MOST_QUEUES ? few : PyMem_Malloc((size_t)of.count * sizeof *of.places);
    PyObject *list = of.places == NULL ? PyErr_NoMemory() : PyList_New(0);
    int64_t opened = 0;
    int is_usual = list != NULL;
    for (; is_usual && opened < of.count; opened++) {
        of.places[opened] = (Place){0};
        is_usual = open_place(&of, args[0], args[3], args[5], opened, &of.places[opened]);
    }
    int is_open = is_usual;
    for (int64_t n = first; is_usual && n < first + readers; n++) {
        PyObject *turn = take_turn(&of, n, most);
        is_usual = turn != NULL && PyList_Append(list, turn) == 0;
        if (is_usual) move_places(&of, turn);
        Py_XDECREF(turn);
    }
    if (list != NULL && (PyErr_Occurred() || (is_open && !save_offsets(&of, args[5])))) Py_CLEAR(list);
    while (opened-- > 0) {
        Py_XDECREF(of.places[opened].number);
        Py_XDECREF(of.places[opened].state);
    }
    if (of.places != few) PyMem_Free(of.places);
    PyBuffer_Release(&of.memory);
    PyBuffer_Release(&of.rows);
    return list;
}

/* --- offset_list and encode_pops --- */

/* start, bits -> the numbers that the bits name, with commas between them; None for more than 63 bits */
PyObject *offset_list(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t start, bits;
    if (count != 2 || !PyLong_CheckExact(args[0]) || !PyLong_CheckExact(args[1])) return wrong_arguments("offset_list");
    if (!as_number(args[0], 0, INT64_MAX - MOST_BITS, &start) || !as_number(args[1], 0, INT64_MAX, &bits)) return refuse();
    byte text[MOST_BITS * 20];
    return PyBytes_FromStringAndSize((const char *)text, put_offsets(text, start, bits) - text);
}

typedef struct {
    int64_t retry_flag, queue_id, start, bits, byte_count;
    PyObject *records; /* owned */
} Queue;

/* What one pop found. */
typedef struct {
    int64_t numbers[4], opaque, byte_count; /* pop time, invisible time, revive queue, rest */
    Queue *queues;
    Py_ssize_t count;
} Found;

/* 0 for a queue that is left to Python, perhaps with an exception. */
static int open_queue(PyObject *object, Queue *queue) {
    queue->records = NULL;
    return number_of(object, s_retry_flag, 0, 0, &queue->retry_flag)
           && number_of(object, s_queue_id, 0, INT32_MAX, &queue->queue_id)
           && number_of(object, s_start_offset, 0, INT64_MAX - MOST_BITS, &queue->start)
           && number_of(object, s_bits, 1, INT64_MAX, &queue->bits)
           && number_of(object, s_byte_count, 0, COPY_BELOW, &queue->byte_count)
           && (queue->records = PyObject_GetAttr(object, s_records)) != NULL && PyTuple_CheckExact(queue->records);
}

static void close_found(Found *found) {
    while (found->count > 0) Py_XDECREF(found->queues[--found->count].records);
    PyMem_Free(found->queues);
}

/* 0 for a pop that is left to Python, perhaps with an exception; close it in any case. */
static int open_found(PyObject *popped, PyObject *opaque, Found *found) {
    PyObject *request = PyObject_GetAttr(popped, s_request), *queues = PyObject_GetAttr(popped, s_queues);
    int is_usual = request != NULL && queues != NULL && PyList_CheckExact(queues) && as_int32(opaque, &found->opaque)
        && PyList_GET_SIZE(queues) <= MOST_QUEUES && number_of(popped, s_pop_time, INT64_MIN, INT64_MAX, &found->numbers[0])
        && number_of(request, s_invisible_millis, INT64_MIN, INT64_MAX, &found->numbers[1])
        && number_of(popped, s_revive_queue, INT64_MIN, INT64_MAX, &found->numbers[2])
        && number_of(popped, s_rest, INT64_MIN, INT64_MAX, &found->numbers[3]);
    if (is_usual && (found->queues = PyMem_Malloc((size_t)PyList_GET_SIZE(queues) * sizeof *found->queues)) == NULL) {
        PyErr_NoMemory();
        is_usual = 0;
    }
    for (Py_ssize_t n = 0; is_usual && n < PyList_GET_SIZE(queues); n++) {
        is_usual = open_queue(PyList_GET_ITEM(queues, n), &found->queues[n]);
        found->byte_count += found->queues[n].byte_count;
        found->count++;
    }
    Py_XDECREF(request);
    Py_XDECREF(queues);
    return is_usual && found->byte_count <= COPY_BELOW;
}

/* The bytes that a reply has at most, without what stands around its numbers and texts. */
static Py_ssize_t most_bytes_of(const Found *found) {
    Py_ssize_t size = 160 + (Py_ssize_t)found->byte_count;
    for (const Queue *queue = found->queues; queue < found->queues + found->count; queue++)
        size += 96 + 20 * __builtin_popcountll((uint64_t)queue->bits);
    return size;
}

/* What stands around four numbers, two texts and the opaque. */
static byte *put_found(byte *frame, PyObject *pieces, const Found *found) {
    byte *header = frame + 8, *at = header;
    const Queue *queues = found->queues;
    for (int n = 0; n < 4; n++) at = put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, n)), found->numbers[n]);
    for (int text = 0; text < 2; text++) {
        at = put_object(at, PyTuple_GET_ITEM(pieces, 4 + text));
        for (Py_ssize_t n = 0; n < found->count; n++) {
            if (n) *at++ = ';';
            at = put_bytes(put_decimal(put_bytes(at, "0 ", 2), queues[n].queue_id), " ", 1);
            at = text ? put_offsets(at, queues[n].start, queues[n].bits) : put_decimal(at, queues[n].start);
        }
    }
    at = put_object(put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, 6)), found->opaque), PyTuple_GET_ITEM(pieces, 7));
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size + (uint32_t)found->byte_count), size);
    return at;
}

/* A copy of the records of all queues; NULL for records that do not lie there, perhaps with an exception. */
static byte *put_records(byte *at, const Found *found) {
    int64_t left = found->byte_count;
    for (Py_ssize_t n = 0; n < found->count && at != NULL; n++) {
        Backlog backlog;
        int64_t copied;
        if (!open_backlog(found->queues[n].records, &backlog)) return NULL;
        at = copy_backlog(at, &backlog, left, &copied);
        left -= copied;
        PyBuffer_Release(&backlog.log);
    }
    return left == 0 ? at : NULL;
}

/* pieces, pops, opaques -> frames, one behind the other; None for what is left to Python */
PyObject *encode_pops(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t around = count == 3 ? measure(args[0], 8) : -1, opened = 0, size = 0;
    if (around < 0 || !PyList_CheckExact(args[1]) || !PyList_CheckExact(args[2])
        || PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[2]))
        return wrong_arguments("encode_pops");
    Py_ssize_t pops = PyList_GET_SIZE(args[1]);
    Found *found = PyMem_Calloc((size_t)pops + 1, sizeof *found);
    if (found == NULL) return PyErr_NoMemory();
    int is_usual = 1;
    for (; is_usual && opened < pops; opened++) {
        is_usual = open_found(PyList_GET_ITEM(args[1], opened), PyList_GET_ITEM(args[2], opened), &found[opened]);
        size += around + most_bytes_of(&found[opened]);
    }
    PyObject *frames = is_usual ? PyBytes_FromStringAndSize(NULL, size) : NULL;
    byte *begin = frames == NULL ? NULL : (byte *)PyBytes_AS_STRING(frames), *at = begin;
    for (Py_ssize_t n = 0; at != NULL && n < pops; n++) at = put_records(put_found(at, args[0], &found[n]), &found[n]);
    if (at == NULL) Py_CLEAR(frames);
    else _PyBytes_Resize(&frames, at - begin);
    while (opened-- > 0) close_found(&found[opened]);
    PyMem_Free(found);
    return frames != NULL ? frames : refuse();
}

int make_pop_names(void) {
    s_retry_flag = PyUnicode_InternFromString("retry_flag");
    s_start_offset = PyUnicode_InternFromString("start_offset");
    s_bits = PyUnicode_InternFromString("bits");
    s_records = PyUnicode_InternFromString("records");
    s_queue = PyUnicode_InternFromString("queue");
    s_byte_count = PyUnicode_InternFromString("byte_count");
    s_request = PyUnicode_InternFromString("request");
    s_queues = PyUnicode_InternFromString("queues");
    s_pop_time = PyUnicode_InternFromString("pop_time");
    s_invisible_millis = PyUnicode_InternFromString("invisible_millis");
    s_revive_queue = PyUnicode_InternFromString("revive_queue");
    s_rest = PyUnicode_InternFromString("rest");
    return s_retry_flag && s_start_offset && s_bits && s_records && s_queue && s_byte_count && s_request && s_queues
        && s_pop_time && s_invisible_millis && s_revive_queue && s_rest;
}
