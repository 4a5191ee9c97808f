/* One record of the log, as far as queues and key index want to know: the usual ones of store/log/walk.py. */
#ifndef DOWNRANGE_RECORDS_H
#define DOWNRANGE_RECORDS_H

#include "steps.h"
#ifndef NOT_IN_A_QUEUE
#define NOT_IN_A_QUEUE 4
#endif

#define MAGIC_V1 0xDAA320A7u
#define HEAD_SIZE 88 /* all that precedes the body, when both hosts are IPv4 */
#define SMALLEST_RECORD 91
#define FIXED_WITHOUT_HOSTS 75 /* a record without hosts, body, topic name and properties */
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32
#define IPV6_EXTRA 12

typedef struct {
    int64_t size, physical_offset, queue_offset, store_timestamp;
    const byte *start, *topic, *properties;
    Py_ssize_t topic_size, properties_size;
    int32_t queue_id;
    uint32_t topic_hash; /* of a TopicTable */
} Record;

/* The record at `at`, of which `left` bytes are there; 0 when it is not whole, not sound, or not the usual one. */
static inline int read_record(const byte *at, Py_ssize_t left, int check_crc, Record *record) {
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
    record->start = at;
    record->size = size;
    record->queue_id = (int32_t)get32(at + 12);
    record->queue_offset = (int64_t)get64(at + 20);
    record->store_timestamp = (int64_t)get64(at + timestamp_at);
    record->topic = at + topic_at, record->topic_size = (Py_ssize_t)(properties_at - 2 - topic_at);
    record->properties = at + properties_at, record->properties_size = (Py_ssize_t)(size - properties_at);
    return 1;
}

#endif
