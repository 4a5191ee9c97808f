/* JSON headers as clients and brokers write them: without white space, numbers as Java writes them. Whatever else JSON
 * allows is refused, and left to Python.
 */
#ifndef DOWNRANGE_JSON_TEXT_H
#define DOWNRANGE_JSON_TEXT_H

#include "steps.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/* The first byte from `at` on that is a quote, a backslash or a control character; `*is_ascii` falls to 0 when a byte
   before it is not ASCII. */
static inline const byte *skip_plain(const byte *at, const byte *end, int *is_ascii) {
#ifdef __SSE2__
    for (; end - at >= 16; at += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)at);
        __m128i quotes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')), slashes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
        __m128i controls = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(' ' - 1)), bytes);
        uint32_t ends = (uint32_t)_mm_movemask_epi8(_mm_or_si128(_mm_or_si128(quotes, slashes), controls));
        uint32_t others = (uint32_t)_mm_movemask_epi8(bytes);
        if (ends) others &= (ends & -ends) - 1; /* those before the end */
        if (others) *is_ascii = 0;
        if (ends) return at + __builtin_ctz(ends);
    }
#endif
    for (; at < end && *at != '"' && *at != '\\' && *at >= ' '; at++)
        if (*at >= 0x80) *is_ascii = 0;
    return at;
}

/* The text between two quotes; `*at` moves behind the second. */
static inline int parse_text(const byte **at, const byte *end, Text *text) {
    const byte *from = *at;
    if (from >= end || *from++ != '"') return 0;
    text->has_escapes = 0, text->is_ascii = 1;
    for (const byte *next = from;; next++) {
        next = skip_plain(next, end, &text->is_ascii);
        if (next >= end || *next < ' ') return 0;
        if (*next == '"') {
            text->at = from, text->size = next - from;
            *at = next + 1;
            return 1;
        }
        text->has_escapes = 1;
        if (++next >= end) return 0;
        if (*next >= 0x80) text->is_ascii = 0;
    }
}

/* As parse_text, and fast for one letter or digit, as the names of most fields and many of their values are. */
static inline int parse_short_text(const byte **at, const byte *end, Text *text) {
    const byte *from = *at;
    if (end - from < 3 || from[0] != '"' || from[2] != '"' || from[1] <= '"' || from[1] == '\\' || from[1] >= 0x80)
        return parse_text(at, end, text);
    *text = (Text){from + 1, 1, 0, 1};
    *at += 3;
    return 1;
}

/* The digits before a comma or brace. */
static inline int parse_json_number(const byte **at, const byte *end, int64_t *number) {
    const byte *from = *at;
    while (*at < end && **at != ',' && **at != '}') ++*at;
    return parse_number(from, *at - from, INT32_MIN, INT32_MAX, number);
}

#endif
