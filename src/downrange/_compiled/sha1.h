/* SHA-1 (FIPS 180-4), with the processor's own instructions where it has them. */
#ifndef DOWNRANGE_SHA1_H
#define DOWNRANGE_SHA1_H

#include "steps.h"

#define SHA1_SIZE 20
#define SHA1_BLOCK 64

typedef struct {
    uint32_t state[5];
    uint64_t taken; /* bytes, with those in `rest` */
    byte rest[SHA1_BLOCK];
} Sha1;

/* Begin, or go on from a state that has taken so many bytes, a multiple of SHA1_BLOCK. */
void sha1_begin(Sha1 *sha);
void sha1_resume(Sha1 *sha, const byte *state, uint64_t taken);
void sha1_take(Sha1 *sha, const byte *at, size_t size);
void sha1_end(Sha1 *sha, byte digest[SHA1_SIZE]);
void sha1_state(const Sha1 *sha, byte state[SHA1_SIZE]);

#endif
