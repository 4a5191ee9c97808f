/* From the header of a send to its values, as protocol/bodies/send.py has them; 0 for an unusual header. */
#include "json_text.h"
#include "send.h"

#define BIT(letter) (1u << ((letter) - 'a'))
#define OPAQUE_SEEN (1u << 20)
#define FLAG_SEEN (1u << 21)
#define EXT_SEEN (1u << 22)
#define NEEDED (BIT('a') | BIT('b') | BIT('e') | BIT('g'))
#define SEND_V1 10
#define SEND_V2 310
#define SEND_BATCH 320
#define JSON_START "{\"code\":"
#define BINARY_FIXED 21

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

static int take_field(Send *send, const Text *name, const Text *value) {
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

/* Bytes behind their length, which takes 2 or 4 bytes; `*at` moves behind them. */
static int cut_text(const byte **at, const byte *end, int length_size, Text *text) {
    if (end - *at < length_size) return 0;
    uint32_t length = length_size == 2 ? (uint32_t)(*at)[0] << 8 | (*at)[1] : get32(*at);
    *at += length_size;
    if (length > (uint64_t)(end - *at)) return 0;
    byte all = 0;
    for (uint32_t n = 0; n < length; n++) all |= (*at)[n];
    *text = (Text){*at, (Py_ssize_t)length, 0, all < 0x80};
    *at += length;
    return 1;
}

static int take_code(Send *send, int64_t code) {
    send->code = code;
    send->is_batch = code == SEND_BATCH;
    return code == SEND_V2 || code == SEND_BATCH || code == SEND_V1;
}

static int parse_binary(const byte *at, Py_ssize_t size, Send *send) {
    if (size < BINARY_FIXED || !take_code(send, at[0] << 8 | at[1])) return 0;
    if (get32(at + 13) != 0 || get32(at + 17) != (uint64_t)(size - BINARY_FIXED)) return 0; /* remark, ext length */
    send->opaque = (int32_t)get32(at + 5);
    send->flag = (int32_t)get32(at + 9);
    const byte *end = at + size;
    at += BINARY_FIXED;
    while (at < end) {
        Text name, value;
        if (!cut_text(&at, end, 2, &name) || !cut_text(&at, end, 4, &value)) return 0;
        if (!take_field(send, &name, &value)) return 0;
    }
    return 1;
}

static int parse_ext(const byte **at, const byte *end, Send *send) {
    Text name, value;
    if (*at >= end || *(*at)++ != '{') return 0;
    for (;;) {
        if (!parse_text(at, end, &name) || *at >= end || *(*at)++ != ':') return 0;
        if (!parse_text(at, end, &value) || !take_field(send, &name, &value) || *at >= end) return 0;
        byte after = *(*at)++;
        if (after == '}') return 1;
        if (after != ',') return 0;
    }
}

static int parse_json(const byte *at, Py_ssize_t size, Send *send) {
    const byte *end = at + size;
    Py_ssize_t start = (Py_ssize_t)strlen(JSON_START);
    if (size < start || memcmp(at, JSON_START, (size_t)start)) return 0;
    at += start;
    /* Clients that write the members in another order take the general way. */
    int64_t code;
    if (!parse_json_number(&at, end, &code) || !take_code(send, code) || at >= end || *at++ != ',') return 0;
    for (;;) {
        Text name, text;
        uint32_t bit = 0;
        int64_t ignored, *number = &ignored;
        int may_be_text = 0;
        if (!parse_text(&at, end, &name) || at >= end || *at++ != ':' || at >= end) return 0;
        if (is_text(&name, "extFields")) bit = EXT_SEEN;
        else if (is_text(&name, "opaque")) bit = OPAQUE_SEEN, number = &send->opaque;
        else if (is_text(&name, "flag")) bit = FLAG_SEEN, number = &send->flag;
        else if (is_text(&name, "language") || is_text(&name, "serializeTypeCurrentRPC")) may_be_text = 1;
        else if (!is_text(&name, "version")) return 0;
        if (send->seen & bit) return 0;
        send->seen |= bit;
        if (bit == EXT_SEEN) {
            if (!parse_ext(&at, end, send)) return 0;
        } else if (may_be_text && *at == '"') {
            if (!parse_text(&at, end, &text) || text.has_escapes || !text.is_ascii) return 0;
        } else if (!parse_json_number(&at, end, number)) return 0;
        if (at >= end) return 0;
        if (*at == '}') return at + 1 == end;
        if (*at++ != ',') return 0;
    }
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
        const char *name = at[1] ? strchr(names, at[1]) : NULL;
        if (name != NULL) {
            *to++ = (byte)values[name - names];
            at += 2;
        } else { /* the separators of properties come as \u0001 and \u0002 */
            if (end - at < 6 || at[1] != 'u' || at[2] != '0' || at[3] != '0') return -1;
            int high = hex_digit(at[4]), low = hex_digit(at[5]);
            if (high < 0 || high > 7 || low < 0) return -1;
            *to++ = (byte)(high << 4 | low);
            at += 6;
        }
    }
}

int parse_send_header(int64_t kind, const byte *header, Py_ssize_t size, Send *send) {
    memset(send, 0, sizeof *send);
    send->properties.at = (const byte *)"";
    int is_read = kind == 1 ? parse_binary(header, size, send) : parse_json(header, size, send);
    return is_read && (send->seen & NEEDED) == NEEDED;
}
