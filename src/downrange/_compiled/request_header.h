/* The header of a request, in either encoding, as clients usually write it: a walk over its fields. */
#ifndef DOWNRANGE_REQUEST_HEADER_H
#define DOWNRANGE_REQUEST_HEADER_H

#include "json_text.h"

#define JSON_START "{\"code\":"
#define BINARY_FIXED 21
#define OPAQUE_SEEN 1
#define FLAG_SEEN 2
#define EXT_SEEN 4

typedef struct {
    int64_t opaque, flag;
} RequestHeader;

/* Both are asked whether the header is still a usual one. */
typedef int TakeCode(void *to, int64_t code);
typedef int TakeField(void *to, const Text *name, const Text *value);

/* Bytes behind their length, which takes 2 or 4 bytes; `*at` moves behind them. */
static inline int cut_text(const byte **at, const byte *end, int length_size, Text *text) {
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

static inline int walk_binary(const byte *at, Py_ssize_t size, RequestHeader *header, TakeCode *take_code,
                              TakeField *take_field, void *to) {
    if (size < BINARY_FIXED || !take_code(to, at[0] << 8 | at[1])) return 0;
    if (get32(at + 13) != 0 || get32(at + 17) != (uint64_t)(size - BINARY_FIXED)) return 0; /* remark, ext length */
    header->opaque = (int32_t)get32(at + 5);
    header->flag = (int32_t)get32(at + 9);
    const byte *end = at + size;
    at += BINARY_FIXED;
    while (at < end) {
        Text name, value;
        if (!cut_text(&at, end, 2, &name) || !cut_text(&at, end, 4, &value)) return 0;
        if (!take_field(to, &name, &value)) return 0;
    }
    return 1;
}

static inline int walk_ext(const byte **at, const byte *end, TakeField *take_field, void *to) {
    Text name, value;
    if (*at >= end || *(*at)++ != '{') return 0;
    for (;;) {
        if (!parse_short_text(at, end, &name) || *at >= end || *(*at)++ != ':') return 0;
        if (!parse_short_text(at, end, &value) || !take_field(to, &name, &value) || *at >= end) return 0;
        byte after = *(*at)++;
        if (after == '}') return 1;
        if (after != ',') return 0;
    }
}

static inline int walk_json(const byte *at, Py_ssize_t size, RequestHeader *header, TakeCode *take_code,
                            TakeField *take_field, void *to) {
    const byte *end = at + size;
    Py_ssize_t start = (Py_ssize_t)strlen(JSON_START);
    if (size < start || memcmp(at, JSON_START, (size_t)start)) return 0;
    at += start;
    /* Clients that write the members in another order take the general way. */
    int64_t code;
    uint32_t seen = 0;
    if (!parse_json_number(&at, end, &code) || !take_code(to, code) || at >= end || *at++ != ',') return 0;
    for (;;) {
        Text name, text;
        uint32_t bit = 0;
        int64_t ignored, *number = &ignored;
        int may_be_text = 0;
        if (!parse_text(&at, end, &name) || at >= end || *at++ != ':' || at >= end) return 0;
        if (is_text(&name, "extFields")) bit = EXT_SEEN;
        else if (is_text(&name, "opaque")) bit = OPAQUE_SEEN, number = &header->opaque;
        else if (is_text(&name, "flag")) bit = FLAG_SEEN, number = &header->flag;
        else if (is_text(&name, "language") || is_text(&name, "serializeTypeCurrentRPC")) may_be_text = 1;
        else if (!is_text(&name, "version")) return 0;
        if (seen & bit) return 0;
        seen |= bit;
        if (bit == EXT_SEEN) {
            if (!walk_ext(&at, end, take_field, to)) return 0;
        } else if (may_be_text && *at == '"') {
            if (!parse_text(&at, end, &text) || text.has_escapes || !text.is_ascii) return 0;
        } else if (!parse_json_number(&at, end, number)) return 0;
        if (at >= end) return 0;
        if (*at == '}') return at + 1 == end;
        if (*at++ != ',') return 0;
    }
}

/* Hands code and fields to the two functions; 0 for a header that is not written as usual. */
static inline int walk_header(int64_t kind, const byte *at, Py_ssize_t size, RequestHeader *header, TakeCode *take_code,
                              TakeField *take_field, void *to) {
    return kind == 1 ? walk_binary(at, size, header, take_code, take_field, to)
                     : walk_json(at, size, header, take_code, take_field, to);
}

#endif
