/* Activations: the inputs of matrix products, in the form that the multiply instruction reads.
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

/* A product's inner loop over registers is written out by the compiler: ALL goes before each loop over M or V.
 *
 * A step over K is one k (fp32), one pair of k (hardware bf16) or a pair in two halves (widened bf16); columns hold
 * VW of the other operand's columns, rows the same value in all lanes: acc += act_row(...) * act_column(...). */
#define ALL _Pragma("GCC unroll 16")

INLINE int act_halves(const int kind) { return kind == KIND_WIDE ? 2 : 1; }

/* Keeps a value in a register: compilers tend to load it again for each use, and loads are the bottleneck. */
INLINE vu in_register(vu x) {
#if VW > 4
    __asm__("" : "+v"(x));
#endif
    return x;
}

static const uint32_t TLT_HIGH_HALVES[VW] __attribute__((aligned(64))) = {[0 ... VW - 1] = 0xffff0000u};

INLINE vf act_column(const int kind, const int half, const char *p) {
    vu x = vloadu32(p);
    if (kind == KIND_WIDE && half) x &= *(const volatile vu *)TLT_HIGH_HALVES; /* held, it would push out a sum */
    if (kind == KIND_WIDE && !half) x <<= 16;
    return (vf)in_register(x);
}

INLINE vf act_row(const char *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return (vf)in_register(vsetu(x));
}

/* The form of the instruction that overwrites the sum is spelt out: left to itself, GCC 12 picks others and copies sums
 * around, up to 1.3 times slower. */
INLINE vf act_fma(const int kind, vf acc, vf a, vf b) {
    if (kind == KIND_DP) return vdp_bf16((vu)a, (vu)b, acc);
#if VW > 4
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#else
    return vfma(a, b, acc);
#endif
}

/* Bytes of a row per K step: one fp32, one bf16 pair, or two floats. */
INLINE long act_step_bytes(const int kind) { return kind == KIND_WIDE ? 8 : 4; }

/* K steps for `k` values. */
INLINE long act_steps(const int kind, long k) { return kind == KIND_F32 ? k : (k + 1) / 2; }

#endif
