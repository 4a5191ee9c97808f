/* JSON headers as clients and brokers write them: without white space, numbers as Java writes them. Whatever else JSON
 * allows is refused, and left to a twin in Python.
 */
#ifndef DOWNRANGE_JSON_TEXT_H
#define DOWNRANGE_JSON_TEXT_H

#include "steps.h"

static inline int is_text(const Text *text, const char *other) {
    return text->size == (Py_ssize_t)strlen(other) && !text->has_escapes && !memcmp(text->at, other, strlen(other));
}

/* A number as Java writes it: no plus, no zeros in front, no minus zero. */
static inline int parse_number(const byte *at, Py_ssize_t size, int64_t least, int64_t most, int64_t *number) {
    int is_negative = size > 1 && at[0] == '-';
    at += is_negative, size -= is_negative;
    if (size < 1 || size > 18 || (at[0] == '0' && (size > 1 || is_negative))) return 0; /* 18 digits do not overflow */
    int64_t value = 0;
    while (size-- > 0) {
        if (*at < '0' || *at > '9') return 0;
        value = value * 10 + (*at++ - '0');
    }
    if (is_negative) value = -value;
    *number = value;
    return value >= least && value <= most;
}

/* The text between two quotes; `*at` moves behind the second. */
static inline int parse_text(const byte **at, const byte *end, Text *text) {
    const byte *from = *at;
    byte all = 0;
    if (from >= end || *from++ != '"') return 0;
    text->has_escapes = 0;
    for (const byte *next = from; next < end; next++) {
        all |= *next;
        if (*next == '"') {
            text->at = from, text->size = next - from, text->is_ascii = all < 0x80;
            *at = next + 1;
            return 1;
        }
        if (*next < ' ') return 0;
        if (*next == '\\') {
            text->has_escapes = 1;
            if (++next >= end) return 0;
            all |= *next;
        }
    }
    return 0;
}

/* The digits before a comma or brace. */
static inline int parse_json_number(const byte **at, const byte *end, int64_t *number) {
    const byte *from = *at;
    while (*at < end && **at != ',' && **at != '}') ++*at;
    return parse_number(from, *at - from, INT32_MIN, INT32_MAX, number);
}

#endif
