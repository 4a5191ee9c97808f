/* Pops: cut_pop of protocol/bodies/pop_frames.py, unread_queues of store/queue/unread.py, encode_popped of
   broker/pop/pop_reply.py, offset_list of protocol/bodies/pop.py. */
#include "queue_tails.h"

#define MOST_QUEUES 64
#define MOST_BITS 63
#define MOST_DIGITS 18

static PyObject *s_retry_flag, *s_start_offset, *s_bits, *s_records;

/* --- cut_pop --- */

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

/* header -> text without two numbers, opaque, born time; None for a header that is written in an unusual way */
PyObject *cut_pop(PyObject *Py_UNUSED(module), PyObject *header) {
    if (!PyBytes_CheckExact(header)) return wrong_arguments("cut_pop");
    const byte *start = (const byte *)PyBytes_AS_STRING(header), *end = start + PyBytes_GET_SIZE(header);
    size_t known = strlen(POP_START);
    if ((size_t)(end - start) < known || memcmp(start, POP_START, known)) Py_RETURN_NONE;
    int64_t opaque, born = 0;
    const byte *at = find(start, end, BORN), *born_at = at == NULL ? start : at + strlen(BORN), *born_end = born_at;
    if (at != NULL && (!cut_number(&born_end, end, MOST_DIGITS, &born) || born_end >= end || *born_end != '"'))
        Py_RETURN_NONE;
    const byte *opaque_at = find(born_end, end, OPAQUE);
    if (opaque_at == NULL) Py_RETURN_NONE;
    opaque_at += strlen(OPAQUE);
    const byte *opaque_end = opaque_at;
    if (!cut_number(&opaque_end, end, 9, &opaque) || opaque_end >= end || *opaque_end != ',') Py_RETURN_NONE;
    PyObject *text = PyBytes_FromStringAndSize(NULL, (end - start) - (born_end - born_at) - (opaque_end - opaque_at));
    if (text == NULL) return NULL;
    byte *to = put_bytes((byte *)PyBytes_AS_STRING(text), start, born_at - start);
    put_bytes(put_bytes(to, born_end, opaque_at - born_end), opaque_end, end - opaque_end);
    return Py_BuildValue("(NLL)", text, (long long)opaque, (long long)born);
}

/* --- unread_queues --- */

/* What all queues are read with. */
typedef struct {
    PyObject *states, *topic, *offsets;
    Py_buffer rows, memory;
    int64_t most, least, end, most_bytes; /* entries; their records lie in the log from `least` to `end` */
} Unread;

/* What an int of a dictionary by queue id is; 0 when there is none that fits, perhaps with an exception. */
static int offset_of(PyObject *offsets, PyObject *queue_id, int64_t *offset) {
    PyObject *value = PyDict_GetItemWithError(offsets, queue_id);
    return value != NULL && as_number(value, 0, INT64_MAX / ENTRY_SIZE, offset);
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
static int64_t bytes_of(const Unread *of, const byte *entries, int64_t count) {
    int64_t total = 0;
    for (const byte *at = entries; at < entries + count * ENTRY_SIZE; at += ENTRY_SIZE) {
        int64_t offset = get64(at), size = get32(at + 8);
        if (offset < of->least || offset > of->end || size > of->end - offset) return -1;
        total += size;
    }
    return total > of->most_bytes ? -1 : total;
}

/* The first unread entries of a queue, as many as are wanted; none, and none of later queues, if they are unusual. */
static PyObject *read_entries(Unread *of, const int64_t *row, int64_t offset, int64_t unread, int64_t *byte_count) {
    int64_t count = unread < of->most ? unread : of->most;
    if (count < 0) count = 0;
    PyObject *entries = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * ENTRY_SIZE);
    *byte_count = 0;
    if (entries == NULL || count == 0) return entries;
    byte *to = (byte *)PyBytes_AS_STRING(entries);
    int64_t position = offset * ENTRY_SIZE;
    if (copy_entries(of, row, position, position + count * ENTRY_SIZE, to)
        && (*byte_count = bytes_of(of, to, count)) > 0) {
        of->most -= count;
        return entries;
    }
    of->most = *byte_count = 0;
    Py_DECREF(entries);
    return PyBytes_FromStringAndSize(NULL, 0);
}

/* Add a queue to the list unless the offset is its end; 0 for a queue that is left to Python, perhaps with an exception. */
static int add_unread(PyObject *list, Unread *of, int64_t queue_id) {
    int64_t offset, row_number, byte_count;
    const int64_t *row = NULL;
    PyObject *number = PyLong_FromLongLong(queue_id), *key = number == NULL ? NULL : PyTuple_Pack(2, of->topic, number);
    PyObject *state = key == NULL ? NULL : PyDict_GetItemWithError(of->states, key);
    if (state != NULL && offset_of(of->offsets, number, &offset)) {
        PyObject *value = PyObject_GetAttr(state, s_row);
        if (value != NULL && as_number(value, 0, INT64_MAX, &row_number)) row = row_at(&of->rows, row_number);
        Py_XDECREF(value);
    }
    int is_known = row != NULL;
    if (is_known && row[END] / ENTRY_SIZE != offset) {
        int64_t unread = row[END] / ENTRY_SIZE - offset;
        PyObject *entries = read_entries(of, row, offset, unread, &byte_count);
        PyObject *found = entries == NULL ? NULL : Py_BuildValue("(LLLNL)", (long long)queue_id, (long long)offset,
                                                                 (long long)unread, entries, (long long)byte_count);
        is_known = found != NULL && PyList_Append(list, found) == 0;
        Py_XDECREF(found);
    }
    Py_XDECREF(key);
    Py_XDECREF(number);
    return is_known;
}

/* states, rows, memory, topic, first queue, queues, offsets, most, readable -> queue id, offset, unread entries, the
   first of them and the bytes of their records, for each queue that has any; None when a queue or an offset is missing */
PyObject *unread_queues(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t first, queues;
    Unread of = {0};
    if (count != 9 || !PyDict_Check(args[0]) || !PyUnicode_CheckExact(args[3]) || !PyDict_Check(args[6])
        || !as_number(args[4], 0, INT32_MAX, &first) || !as_number(args[5], 0, INT32_MAX, &queues)
        || !as_number(args[7], 0, INT32_MAX, &of.most) || !PyTuple_CheckExact(args[8]) || PyTuple_GET_SIZE(args[8]) != 3
        || !as_number(PyTuple_GET_ITEM(args[8], 0), 0, INT64_MAX, &of.least)
        || !as_number(PyTuple_GET_ITEM(args[8], 1), 0, INT64_MAX, &of.end)
        || !as_number(PyTuple_GET_ITEM(args[8], 2), 0, INT64_MAX, &of.most_bytes))
        return wrong_arguments("unread_queues");
    if (!take_buffer(args[1], &of.rows) || !take_buffer(args[2], &of.memory)) {
        if (of.rows.obj != NULL) PyBuffer_Release(&of.rows);
        if (of.memory.obj != NULL) PyBuffer_Release(&of.memory);
        return wrong_arguments("unread_queues");
    }
    of.states = args[0], of.topic = args[3], of.offsets = args[6];
    PyObject *list = PyList_New(0);
    for (int64_t n = first; list != NULL && n < first + queues; n++)
        if (!add_unread(list, &of, n % queues)) Py_CLEAR(list);
    PyBuffer_Release(&of.memory);
    PyBuffer_Release(&of.rows);
    return list != NULL ? list : refuse();
}

/* --- offset_list and encode_popped --- */

static byte *put_offsets(byte *at, int64_t start, int64_t bits) {
    for (int is_first = 1; bits != 0; bits >>= 1, start++) {
        if (!(bits & 1)) continue;
        if (!is_first) *at++ = ',';
        at = put_decimal(at, start);
        is_first = 0;
    }
    return at;
}

/* start, bits -> the numbers that the bits name, with commas between them; None for more than 63 bits */
PyObject *offset_list(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t start, bits;
    if (count != 2 || !PyLong_CheckExact(args[0]) || !PyLong_CheckExact(args[1])) return wrong_arguments("offset_list");
    if (!as_number(args[0], 0, INT64_MAX - MOST_BITS, &start) || !as_number(args[1], 0, INT64_MAX, &bits)) return refuse();
    byte text[MOST_BITS * 20];
    return PyBytes_FromStringAndSize((const char *)text, put_offsets(text, start, bits) - text);
}

typedef struct {
    int64_t retry_flag, queue_id, start, bits;
    PyObject *records; /* owned */
} Queue;

static int number_of(PyObject *object, PyObject *name, int64_t least, int64_t most, int64_t *number) {
    PyObject *value = PyObject_GetAttr(object, name);
    int is_number = value != NULL && as_number(value, least, most, number);
    Py_XDECREF(value);
    return is_number;
}

/* 0 for a queue that is left to Python, perhaps with an exception. */
static int open_queue(PyObject *object, Queue *queue) {
    queue->records = NULL;
    return number_of(object, s_retry_flag, 0, 0, &queue->retry_flag)
           && number_of(object, s_queue_id, 0, INT32_MAX, &queue->queue_id)
           && number_of(object, s_start_offset, 0, INT64_MAX - MOST_BITS, &queue->start)
           && number_of(object, s_bits, 1, INT64_MAX, &queue->bits)
           && (queue->records = PyObject_GetAttr(object, s_records)) != NULL && PyTuple_CheckExact(queue->records);
}

/* What stands around four numbers, two texts and the opaque. */
static byte *put_found(byte *frame, PyObject *pieces, const int64_t *numbers, const Queue *queues, Py_ssize_t count,
                       int64_t opaque, int64_t body_size) {
    byte *header = frame + 8, *at = header;
    for (int n = 0; n < 4; n++) at = put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, n)), numbers[n]);
    for (int text = 0; text < 2; text++) {
        at = put_object(at, PyTuple_GET_ITEM(pieces, 4 + text));
        for (Py_ssize_t n = 0; n < count; n++) {
            if (n) *at++ = ';';
            at = put_bytes(put_decimal(put_bytes(at, "0 ", 2), queues[n].queue_id), " ", 1);
            at = text ? put_offsets(at, queues[n].start, queues[n].bits) : put_decimal(at, queues[n].start);
        }
    }
    at = put_object(put_decimal(put_object(at, PyTuple_GET_ITEM(pieces, 6)), opaque), PyTuple_GET_ITEM(pieces, 7));
    uint32_t size = (uint32_t)(at - header);
    put32(put32(frame, 4 + size + (uint32_t)body_size), size);
    return at;
}

/* The head behind which the records of all queues are copied; NULL, perhaps without an exception. */
static PyObject *with_records(const byte *head, Py_ssize_t head_size, const Queue *queues, Py_ssize_t count, int64_t size) {
    PyObject *frame = PyBytes_FromStringAndSize(NULL, head_size + (Py_ssize_t)size);
    if (frame == NULL) return NULL;
    byte *at = put_bytes((byte *)PyBytes_AS_STRING(frame), head, head_size);
    for (Py_ssize_t n = 0; n < count && at != NULL; n++) {
        Backlog backlog;
        int64_t copied;
        if (!open_backlog(queues[n].records, &backlog)) {
            at = NULL;
            break;
        }
        at = copy_backlog(at, &backlog, size, &copied);
        size -= copied;
        PyBuffer_Release(&backlog.log);
    }
    if (at == NULL || size != 0) Py_CLEAR(frame);
    return frame;
}

/* pieces, numbers, opaque, queues, bytes of records -> frame; None for what is left to Python */
PyObject *encode_popped(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t numbers[4], opaque, size;
    Queue queues[MOST_QUEUES];
    Py_ssize_t around = count == 5 ? measure(args[0], 8) : -1;
    if (around < 0 || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != 4 || !as_int32(args[2], &opaque)
        || !PyList_CheckExact(args[3]) || !as_number(args[4], 0, INT64_MAX, &size))
        return wrong_arguments("encode_popped");
    for (int n = 0; n < 4; n++)
        if (!as_number(PyTuple_GET_ITEM(args[1], n), INT64_MIN, INT64_MAX, &numbers[n]))
            return wrong_arguments("encode_popped");
    Py_ssize_t queue_count = PyList_GET_SIZE(args[3]), opened = 0, texts = 0;
    if (queue_count > MOST_QUEUES || size > COPY_BELOW) Py_RETURN_NONE;
    PyObject *frame = NULL;
    for (int is_usual = 1; is_usual && opened < queue_count; opened++) {
        is_usual = open_queue(PyList_GET_ITEM(args[3], opened), &queues[opened]);
        if (!is_usual) queue_count = -1;
        else texts += 96 + 20 * __builtin_popcountll((uint64_t)queues[opened].bits);
    }
    byte *head = queue_count < 0 ? NULL : PyMem_Malloc((size_t)(around + texts + 160));
    if (head != NULL) {
        Py_ssize_t head_size = put_found(head, args[0], numbers, queues, queue_count, opaque, size) - head;
        frame = with_records(head, head_size, queues, queue_count, size);
        PyMem_Free(head);
    } else if (queue_count >= 0) PyErr_NoMemory();
    while (opened-- > 0) Py_XDECREF(queues[opened].records);
    return frame != NULL ? frame : refuse();
}

int make_pop_names(void) {
    s_retry_flag = PyUnicode_InternFromString("retry_flag");
    s_start_offset = PyUnicode_InternFromString("start_offset");
    s_bits = PyUnicode_InternFromString("bits");
    s_records = PyUnicode_InternFromString("records");
    return s_retry_flag && s_start_offset && s_bits && s_records;
}
