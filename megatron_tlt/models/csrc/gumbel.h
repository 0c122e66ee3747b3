/* Keyed Gumbel noise: G of a token from a counter-based hash of (row key, token id).
 *
 * x = mix(key + (token + 1) * 0x9E3779B97F4A7C15) with the finaliser of splitmix64, m = x >> 40 (24 bits),
 * u = (m + 1/2) / 2^24, G = -log(-log u). For m >= 2^23 the number m + 1/2 does not fit 24 bits: rounding u
 * to fp32 would give u = 1 and G = inf once in 2^24 draws. So u near 1 is handled through 1 - u, which is exact.
 */
#ifndef TLT_GUMBEL_H
#define TLT_GUMBEL_H

#include "simd.h"

/* Gumbel noise of VW tokens from `token` on. */
INLINE vf gumbel(uint64_t key, int64_t token) {
    float mantissa[VW];
    for (int i = 0; i < VW; i++) {
        uint64_t z = key + (uint64_t)(token + i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        mantissa[i] = (float)(int32_t)(z >> 40);
    }
    const vf unit = vset(5.9604644775390625e-8f); /* 2^-24 */
    vf m = vload(mantissa);
    vi upper = m >= vset(8388608.0f);
    /* 1 - u, exact in the upper half; u itself, exact in the lower half. */
    vf w = (vset(16777215.0f) - m + vset(0.5f)) * unit;
    vf u = (m + vset(0.5f)) * unit;
    vi near_one = w < vset(0.29289f);
    vf f = vselect(near_one, -w, vset(1.0f) - (w + w)); /* u = 1 + f, or u = (1 + f) / 2 */
    vf e = vselect(near_one, vzero(), vset(-1.0f));
    vf log_upper = vlog_parts(e, f), log_lower = vlog(u);
    return -vlog(-vselect(upper, log_upper, log_lower));
}

#endif
