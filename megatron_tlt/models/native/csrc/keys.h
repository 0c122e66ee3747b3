/* Row keys: the key of one output position, from the key that all positions of an answer share. */
#ifndef TLT_KEYS_H
#define TLT_KEYS_H

#include "simd.h"

/* mix(request key ^ t * P) with the finaliser of splitmix64, as the engine makes it (rollout/keys.py). */
INLINE uint64_t row_key(uint64_t request_key, int64_t position) {
    uint64_t z = request_key ^ (uint64_t)position * 0xE7037ED1A0B428DBull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

#endif
