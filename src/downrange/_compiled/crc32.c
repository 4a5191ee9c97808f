/* CRC-32 as zlib computes it. */
#include "steps.h"

static uint32_t crc_table[8][256];

void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ 0xEDB88320u : c >> 1;
        crc_table[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int n = 0; n < 256; n++) {
            uint32_t c = crc_table[k - 1][n];
            crc_table[k][n] = crc_table[0][c & 0xFF] ^ c >> 8;
        }
}

/* Eight bytes at a time, by tables. */
static uint32_t go_on(uint32_t c, const byte *at, Py_ssize_t size) {
    for (; size >= 8; size -= 8, at += 8) {
        c ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        c = crc_table[7][c & 0xFF] ^ crc_table[6][c >> 8 & 0xFF] ^ crc_table[5][c >> 16 & 0xFF] ^ crc_table[4][c >> 24]
            ^ crc_table[3][at[4]] ^ crc_table[2][at[5]] ^ crc_table[1][at[6]] ^ crc_table[0][at[7]];
    }
    while (size-- > 0) c = crc_table[0][(c ^ *at++) & 0xFF] ^ c >> 8;
    return c;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SHORTEST_FOLDED 64

static inline __m128i sixteen(const byte *at) { return _mm_loadu_si128((const __m128i *)at); }

/* What `part` amounts to so many bytes later, as `powers` says, and what is there. */
__attribute__((target("pclmul"))) static inline __m128i fold(__m128i part, __m128i powers, __m128i there) {
    __m128i low = _mm_clmulepi64_si128(part, powers, 0x00), high = _mm_clmulepi64_si128(part, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

/* Sixty-four bytes at a time, by multiplication without carry. Whatever number of bytes is folded into the sixteen that
   follow them leaves the same remainder; that of the last sixteen is found by tables. */
__attribute__((target("pclmul"))) static uint32_t go_on_folding(uint32_t c, const byte *at, Py_ssize_t size) {
    const __m128i by_64 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4), by_16 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
    __m128i a = _mm_xor_si128(sixteen(at), _mm_cvtsi32_si128((int)c));
    __m128i b = sixteen(at + 16), d = sixteen(at + 32), e = sixteen(at + 48);
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
        a = fold(a, by_64, sixteen(at));
        b = fold(b, by_64, sixteen(at + 16));
        d = fold(d, by_64, sixteen(at + 32));
        e = fold(e, by_64, sixteen(at + 48));
    }
    e = fold(fold(fold(a, by_16, b), by_16, d), by_16, e);
    for (; size >= 16; at += 16, size -= 16) e = fold(e, by_16, sixteen(at));
    byte last[16];
    _mm_storeu_si128((__m128i *)last, e);
    return go_on(go_on(0, last, 16), at, size);
}

uint32_t crc32_of(const byte *at, Py_ssize_t size) {
    if (size >= SHORTEST_FOLDED && __builtin_cpu_supports("pclmul")) return ~go_on_folding(0xFFFFFFFFu, at, size);
    return ~go_on(0xFFFFFFFFu, at, size);
}
#else
uint32_t crc32_of(const byte *at, Py_ssize_t size) { return ~go_on(0xFFFFFFFFu, at, size); }
#endif
