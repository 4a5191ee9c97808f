/* The layout of a stored record and its reader: docs/formats/record.md, model/record.py. */
#ifndef DOWNRANGE_RECORDS_H
#define DOWNRANGE_RECORDS_H

#include "steps.h"

#define MAGIC_V1 0xDAA320A7u
#define MAGIC_V2 0xDAA320ABu /* the topic length takes two bytes */
#define FIXED_SIZE 91        /* a V1 record with IPv4 hosts and nothing in it */
#define FIXED_WITHOUT_HOSTS (FIXED_SIZE - 16)
#define HEAD_SIZE 88         /* all that precedes the body, when both hosts are IPv4 */
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32
#define IPV6_EXTRA 12
#define CRC_MASK 0x7FFFFFFFu
#define NOT_IN_A_QUEUE 4 /* the bit that prepared and rolled-back messages have in sysFlag */

/* Positions of fields, of a record with IPv4 hosts. */
enum {
    SIZE_AT = 0, MAGIC_AT = 4, BODY_CRC_AT = 8, QUEUE_ID_AT = 12, FLAG_AT = 16, QUEUE_OFFSET_AT = 20,
    PHYSICAL_OFFSET_AT = 28, SYS_FLAG_AT = 36, BORN_TIMESTAMP_AT = 40, BORN_HOST_AT = 48, STORE_TIMESTAMP_AT = 56,
    STORE_HOST_AT = 64, RECONSUME_TIMES_AT = 72, PREPARED_OFFSET_AT = 76, BODY_LENGTH_AT = 84,
};
_Static_assert(BODY_LENGTH_AT + 4 == HEAD_SIZE && HEAD_SIZE + 3 == FIXED_SIZE, "the layout of model/record.py");

typedef struct {
    const byte *start, *body, *topic, *properties;
    Py_ssize_t body_size, topic_size, properties_size;
    int64_t size, queue_offset, physical_offset, store_timestamp; /* the physical offset is the caller's to know */
    int32_t queue_id;
    uint32_t sys_flag;
    uint32_t topic_hash; /* of a TopicTable */
    int born_extra, store_extra; /* how much longer than an IPv4 host each host is */
} Record;

/* The record at `at`, of which `left` bytes are there; 0 when it is not whole, or its lengths do not add up. */
static inline int read_record(const byte *at, Py_ssize_t left, Record *record) {
    if (left < FIXED_SIZE) return 0;
    uint32_t magic = get32(at + MAGIC_AT), sys_flag = get32(at + SYS_FLAG_AT);
    int64_t size = (int32_t)get32(at + SIZE_AT);
    if ((magic != MAGIC_V1 && magic != MAGIC_V2) || size < FIXED_SIZE || size > left) return 0;
    record->born_extra = sys_flag & BORN_HOST_V6 ? IPV6_EXTRA : 0;
    record->store_extra = sys_flag & STORE_HOST_V6 ? IPV6_EXTRA : 0;
    int64_t body_at = HEAD_SIZE + record->born_extra + record->store_extra;
    if (body_at > size) return 0;
    int64_t body_size = (int32_t)get32(at + body_at - 4), length_size = magic == MAGIC_V2 ? 2 : 1;
    int64_t topic_at = body_at + body_size + length_size;
    if (body_size < 0 || topic_at + 2 > size || at[topic_at - length_size] > 127) return 0;
    int64_t topic_size = at[topic_at - 1] + (length_size == 2 ? at[topic_at - 2] << 8 : 0);
    int64_t properties_at = topic_at + topic_size + 2;
    if (properties_at > size || at[properties_at - 2] > 127
        || properties_at + (at[properties_at - 2] << 8 | at[properties_at - 1]) != size)
        return 0;
    record->start = at;
    record->size = size;
    record->sys_flag = sys_flag;
    record->queue_id = (int32_t)get32(at + QUEUE_ID_AT);
    record->queue_offset = get64(at + QUEUE_OFFSET_AT);
    record->store_timestamp = get64(at + STORE_TIMESTAMP_AT + record->born_extra);
    record->body = at + body_at, record->body_size = (Py_ssize_t)body_size;
    record->topic = at + topic_at, record->topic_size = (Py_ssize_t)topic_size;
    record->properties = at + properties_at, record->properties_size = (Py_ssize_t)(size - properties_at);
    return 1;
}

static inline int has_right_checksum(const Record *record) {
    return (crc32_of(record->body, record->body_size) & CRC_MASK) == get32(record->start + BODY_CRC_AT);
}

#endif
