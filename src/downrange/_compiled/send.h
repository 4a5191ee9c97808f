/* The header of a send: what parse_send.c reads and usual_sends.c makes messages of. */
#ifndef DOWNRANGE_SEND_H
#define DOWNRANGE_SEND_H

#include "steps.h"

typedef struct {
    uint32_t seen; /* one bit for each letter of the V2 names */
    int is_batch;
    Text topic, properties;
    int64_t code, opaque, flag, queue_id, sys_flag, born_timestamp, message_flag, reconsume_times;
} Send;

/* Reads what clients usually write; 0 for everything else. */
int parse_send_header(int64_t kind, const byte *header, Py_ssize_t size, Send *send);

/* Text with its escapes resolved, into `to`, which has room for `text->size` bytes; -1 for rare escapes. */
Py_ssize_t unescape(const Text *text, byte *to);

#endif
