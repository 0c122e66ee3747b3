/* Keyed Gumbel noise: G of a token from a counter-based hash of (row key, token id), as models/decoders/keys.py and
 * models/decoders/keyed_noise.py make it.
 *
 * A row key is the key of one output position t, mix(request key ^ t * P), with mix the finaliser of splitmix64.
 * x = mix(key + (token + 1) * 0x9E3779B97F4A7C15), m = x >> 40 (24 bits),
 * u = (m + 1/2) / 2^24, G = -log(-log u). For m >= 2^23 the number m + 1/2 does not fit 24 bits: rounding u
 * to fp32 would give u = 1 and G = inf once in 2^24 draws. So u near 1 is handled through 1 - u, which is exact.
 */
#ifndef TLT_NOISE_H
#define TLT_NOISE_H

#include "simd.h"

typedef uint64_t vq __attribute__((vector_size(VW * 4))); /* half as many numbers as a vector of floats */

/* The finaliser of splitmix64, of a uint64_t or of each one in a vector. */
#define MIX(number) ({ \
    __typeof__(number) z_ = (number); \
    z_ = (z_ ^ (z_ >> 30)) * 0xBF58476D1CE4E5B9ull; \
    z_ = (z_ ^ (z_ >> 27)) * 0x94D049BB133111EBull; \
    z_ ^ (z_ >> 31); \
})
#define TOKEN_STEP ((uint64_t)0x9E3779B97F4A7C15) /* no unsigned long long, which clang adds to no vector of uint64_t */

INLINE uint64_t row_key(uint64_t request_key, int64_t position) {
    return MIX(request_key ^ (uint64_t)position * 0xE7037ED1A0B428DBull);
}

/* Gumbel noise of VW tokens, by their key + (token + 1) * TOKEN_STEP. Even and odd tokens are hashed apart and meet as
 * the low and high halves of 64-bit lanes, which puts them in order without a shuffle. */
INLINE vf gumbel_of(vq even, vq odd) {
    const vq bits = MIX(even) >> 40 | MIX(odd) >> 40 << 32;
    const vf m = __builtin_convertvector((vi)bits, vf);
    const vf unit = vset(5.9604644775390625e-8f); /* 2^-24 */
    vi upper = m >= vset(8388608.0f);
    /* 1 - u, exact in the upper half; u itself, exact in the lower half. */
    vf w = (vset(16777215.0f) - m + vset(0.5f)) * unit;
    vf u = (m + vset(0.5f)) * unit;
    vi near_one = w < vset(0.29289f);
    vf e, f;
    vlog_split(u, &e, &f);
    /* Upper half: u = 1 + f, or u = (1 + f) / 2. */
    f = vselect(upper, vselect(near_one, -w, vset(1.0f) - (w + w)), f);
    e = vselect(upper, vselect(near_one, vzero(), vset(-1.0f)), e);
    return -vlog(-vlog_parts(e, f));
}

/* Of VW tokens from `token` on; of those at `ids`. */
INLINE vf gumbel(uint64_t key, int64_t token) {
    vq even;
    for (int i = 0; i < VW / 2; i++) even[i] = (uint64_t)(2 * i + 1) * TOKEN_STEP;
    even = even + (key + (uint64_t)token * TOKEN_STEP);
    return gumbel_of(even, even + TOKEN_STEP);
}

INLINE vf gumbel_at(uint64_t key, const int32_t *ids) {
    vq both;
    memcpy(&both, ids, sizeof both);
    return gumbel_of(key + ((both & 0xFFFFFFFFu) + 1) * TOKEN_STEP, key + ((both >> 32) + 1) * TOKEN_STEP);
}

#endif
