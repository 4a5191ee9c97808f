#include "sha1.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_SHA_CODE 1
#else
#define HAS_SHA_CODE 0
#endif

static const uint32_t START[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};

static inline uint32_t rotate(uint32_t value, int by) { return value << by | value >> (32 - by); }

static void plain_blocks(uint32_t state[5], const byte *at, size_t blocks) {
    uint32_t w[80];
    for (; blocks > 0; blocks--, at += SHA1_BLOCK) {
        for (int t = 0; t < 16; t++) w[t] = get32(at + 4 * t);
        for (int t = 16; t < 80; t++) w[t] = rotate(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (int t = 0; t < 80; t++) {
            uint32_t f, k;
            if (t < 20) f = (b & c) | (~b & d), k = 0x5A827999;
            else if (t < 40) f = b ^ c ^ d, k = 0x6ED9EBA1;
            else if (t < 60) f = (b & c) | (b & d) | (c & d), k = 0x8F1BBCDC;
            else f = b ^ c ^ d, k = 0xCA62C1D6;
            uint32_t next = rotate(a, 5) + f + e + k + w[t];
            e = d, d = c, c = rotate(b, 30), b = a, a = next;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
    }
}

#if HAS_SHA_CODE
/* Four rounds at a time: `words` has the last sixteen words of the message schedule, four in each. */
#define FOUR_ROUNDS(n, constant)                                                          \
    do {                                                                                  \
        __m128i now = words[(n) & 3];                                                     \
        __m128i added = (n) == 0 ? _mm_add_epi32(e, now) : _mm_sha1nexte_epu32(e, now);   \
        e = abcd;                                                                         \
        abcd = _mm_sha1rnds4_epu32(abcd, added, constant);                                \
        if ((n) < 16) {                                                                   \
            __m128i part = _mm_sha1msg1_epu32(now, words[((n) + 1) & 3]);                 \
            part = _mm_xor_si128(part, words[((n) + 2) & 3]);                             \
            words[(n) & 3] = _mm_sha1msg2_epu32(part, words[((n) + 3) & 3]);              \
        }                                                                                 \
    } while (0)

__attribute__((target("sha,sse4.1,ssse3"))) static void sha_blocks(uint32_t state[5], const byte *at, size_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0001020304050607, 0x08090A0B0C0D0E0F);
    __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0x1B);
    __m128i e = _mm_set_epi32((int)state[4], 0, 0, 0);
    for (; blocks > 0; blocks--, at += SHA1_BLOCK) {
        __m128i abcd_before = abcd, e_before = e, words[4];
        for (int n = 0; n < 4; n++)
            words[n] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at + 16 * n)), swap);
        FOUR_ROUNDS(0, 0); FOUR_ROUNDS(1, 0); FOUR_ROUNDS(2, 0); FOUR_ROUNDS(3, 0); FOUR_ROUNDS(4, 0);
        FOUR_ROUNDS(5, 1); FOUR_ROUNDS(6, 1); FOUR_ROUNDS(7, 1); FOUR_ROUNDS(8, 1); FOUR_ROUNDS(9, 1);
        FOUR_ROUNDS(10, 2); FOUR_ROUNDS(11, 2); FOUR_ROUNDS(12, 2); FOUR_ROUNDS(13, 2); FOUR_ROUNDS(14, 2);
        FOUR_ROUNDS(15, 3); FOUR_ROUNDS(16, 3); FOUR_ROUNDS(17, 3); FOUR_ROUNDS(18, 3); FOUR_ROUNDS(19, 3);
        e = _mm_sha1nexte_epu32(e, e_before);
        abcd = _mm_add_epi32(abcd, abcd_before);
    }
    _mm_storeu_si128((__m128i *)state, _mm_shuffle_epi32(abcd, 0x1B));
    state[4] = (uint32_t)_mm_extract_epi32(e, 3);
}

static int has_sha(void) {
    static int known = -1;
    unsigned a, b, c, d;
    if (known < 0) known = __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1;
    return known;
}
#endif

static void take_blocks(uint32_t state[5], const byte *at, size_t blocks) {
#if HAS_SHA_CODE
    if (has_sha()) {
        sha_blocks(state, at, blocks);
        return;
    }
#endif
    plain_blocks(state, at, blocks);
}

void sha1_begin(Sha1 *sha) {
    memcpy(sha->state, START, sizeof START);
    sha->taken = 0;
}

void sha1_resume(Sha1 *sha, const byte *state, uint64_t taken) {
    for (int n = 0; n < 5; n++) sha->state[n] = get32(state + 4 * n);
    sha->taken = taken;
}

void sha1_take(Sha1 *sha, const byte *at, size_t size) {
    size_t used = sha->taken % SHA1_BLOCK;
    sha->taken += size;
    if (used) {
        size_t part = SHA1_BLOCK - used < size ? SHA1_BLOCK - used : size;
        memcpy(sha->rest + used, at, part);
        at += part, size -= part;
        if (used + part < SHA1_BLOCK) return;
        take_blocks(sha->state, sha->rest, 1);
    }
    take_blocks(sha->state, at, size / SHA1_BLOCK);
    memcpy(sha->rest, at + size / SHA1_BLOCK * SHA1_BLOCK, size % SHA1_BLOCK);
}

void sha1_state(const Sha1 *sha, byte state[SHA1_SIZE]) {
    for (int n = 0; n < 5; n++) put32(state + 4 * n, sha->state[n]);
}

void sha1_end(Sha1 *sha, byte digest[SHA1_SIZE]) {
    byte tail[2 * SHA1_BLOCK] = {0x80};
    size_t used = sha->taken % SHA1_BLOCK, padding = (used < 56 ? 56 : 120) - used;
    put64(tail + padding, sha->taken * 8);
    sha1_take(sha, tail, padding + 8);
    sha1_state(sha, digest);
}
