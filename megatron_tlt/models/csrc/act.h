/* Activations: the inputs of matrix products, held in the form that the multiply instruction wants.
 *
 * Weights and cached keys/values are fp32, or bf16 in pairs (two consecutive k of one column share 32 bits).
 * The other operand is then: fp32 (KIND_F32); bf16 pairs (KIND_DP, hardware dot product); or floats rounded to
 * bf16 values (KIND_WIDE, machines without it), so that both bf16 kinds multiply the same numbers.
 */
#ifndef TLT_ACT_H
#define TLT_ACT_H

#include "simd.h"

enum { KIND_F32 = 0, KIND_DP = 1, KIND_WIDE = 2 };
#define KIND_BF16 (TLT_DPBF16 ? KIND_DP : KIND_WIDE)

INLINE long act_bytes(int kind) { return kind == KIND_DP ? 2 : 4; }

/* Stores VW values at element `i`. */
INLINE void act_store(int kind, void *base, long i, vf x) {
    if (kind == KIND_F32) {
        vstore((float *)base + i, x);
    } else if (kind == KIND_WIDE) {
        vstore((float *)base + i, (vf)(vround_bf16(x) << 16));
    } else {
#if TLT_DPBF16
        __m256bh h = _mm512_cvtneps_pbh((__m512)x);
        memcpy((uint16_t *)base + i, &h, sizeof h);
#endif
    }
}

/* One step over K for one row: acc += a * b, where b holds one k (fp32) or a pair of k (bf16) per lane.
 * `a` points at the row's value(s) for this step. */
INLINE vf act_mac(const int kind, vf acc, const char *a, vu b) {
    if (kind == KIND_F32) return vfma(vset(*(const float *)a), (vf)b, acc);
    if (kind == KIND_WIDE) {
        acc = vfma(vset(((const float *)a)[0]), (vf)(b << 16), acc);
        return vfma(vset(((const float *)a)[1]), (vf)(b & 0xffff0000u), acc);
    }
#if TLT_DPBF16
    int32_t pair;
    memcpy(&pair, a, 4);
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
#else
    return acc;
#endif
}

/* Bytes of a row per K step: one fp32, one bf16 pair, or two floats. */
INLINE long act_step_bytes(const int kind) { return kind == KIND_WIDE ? 8 : 4; }

/* K steps for `k` values. */
INLINE long act_steps(const int kind, long k) { return kind == KIND_F32 ? k : (k + 1) / 2; }

#endif
