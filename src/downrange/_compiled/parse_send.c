/* From the header of a send to its values, as protocol/bodies/send.py has them; 0 for an unusual header. */
#include "request_header.h"
#include "send.h"

#define BIT(letter) (1u << ((letter) - 'a'))
#define NEEDED (BIT('a') | BIT('b') | BIT('e') | BIT('g'))
#define SEND_V1 10
#define SEND_V2 310
#define SEND_BATCH 320

/* The V1 names of a, b and so on. */
static const char *const V1_NAMES[] = {
    "producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag",
    "properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch", "bname",
};

/* The V2 name of a field; 0 for one that says nothing about the message: a signature, say. */
static byte letter_of(const Send *send, const Text *name) {
    if (send->code != SEND_V1) return name->size == 1 ? name->at[0] : 0;
    for (byte n = 0; n < sizeof V1_NAMES / sizeof *V1_NAMES; n++)
        if (is_text(name, V1_NAMES[n])) return (byte)('a' + n);
    return 0;
}

static int take_field(void *to, const Text *name, const Text *value) {
    Send *send = to;
    int64_t ignored, *number = &ignored;
    byte letter = letter_of(send, name);
    if (letter == 0) return name->size && name->is_ascii && value->is_ascii && !name->has_escapes && !value->has_escapes;
    if (letter < 'a' || letter > 'n' || send->seen & BIT(letter)) return 0;
    send->seen |= BIT(letter);
    if (letter == 'i') {
        send->properties = *value;
        return 1;
    }
    if (value->size == 0) return 0;
    if (letter == 'b') {
        send->topic = *value;
        return 1;
    }
    if (value->has_escapes || !value->is_ascii) return 0;
    switch (letter) {
    case 'a': case 'c': case 'n': return 1;
    case 'k': return is_text(value, "false") || is_text(value, "true");
    case 'm':
        send->is_batch |= is_text(value, "true");
        return is_text(value, "false") || is_text(value, "true");
    case 'g': return parse_number(value->at, value->size, INT64_MIN, INT64_MAX, &send->born_timestamp);
    case 'e': number = &send->queue_id; break;
    case 'f': number = &send->sys_flag; break;
    case 'h': number = &send->message_flag; break;
    case 'j': number = &send->reconsume_times; break;
    default: break; /* d and l: a number that nobody reads */
    }
    return parse_number(value->at, value->size, INT32_MIN, INT32_MAX, number);
}

static int take_code(void *to, int64_t code) {
    Send *send = to;
    send->code = code;
    send->is_batch = code == SEND_BATCH;
    return code == SEND_V2 || code == SEND_BATCH || code == SEND_V1;
}

static int hex_digit(byte c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

Py_ssize_t unescape(const Text *text, byte *to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const byte *at = text->at, *end = at + text->size;
    byte *start = to;
    for (;;) {
        const byte *slash = memchr(at, '\\', (size_t)(end - at));
        to = put_bytes(to, at, (slash != NULL ? slash : end) - at);
        if (slash == NULL) return to - start;
        at = slash;
        if (end - at < 2) return -1;
        if (at[1] == 'u') { /* the separators of properties come as \u0001 and \u0002 */
            if (end - at < 6 || at[2] != '0' || at[3] != '0') return -1;
            int high = hex_digit(at[4]), low = hex_digit(at[5]);
            if (high < 0 || high > 7 || low < 0) return -1;
            *to++ = (byte)(high << 4 | low);
            at += 6;
        } else {
            const char *name = at[1] ? strchr(names, at[1]) : NULL;
            if (name == NULL) return -1;
            *to++ = (byte)values[name - names];
            at += 2;
        }
    }
}

int parse_send_header(int64_t kind, const byte *header, Py_ssize_t size, Send *send) {
    memset(send, 0, sizeof *send);
    send->properties.at = (const byte *)"";
    RequestHeader read = {0, 0};
    int is_read = walk_header(kind, header, size, &read, take_code, take_field, send);
    send->opaque = read.opaque, send->flag = read.flag;
    return is_read && (send->seen & NEEDED) == NEEDED;
}
