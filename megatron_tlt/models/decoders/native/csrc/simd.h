/* Vectors of VW floats, one spelling for AVX-512, AVX2 and any other machine (GCC/Clang vector types).
 *
 * Every routine gives each lane the same operations whatever its neighbours hold, and nothing here depends on
 * the number of rows or threads: so the decoder's results are independent of the batch.
 */
#ifndef TLT_SIMD_H
#define TLT_SIMD_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(TLT_EMULATE)
#define VW 16
#define MR 12
#define HAS_VW 0   /* whether the machine has registers of VW floats */
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define VW 16      /* floats in a vector */
#define MR 12      /* rows of a register block */
#define HAS_VW 1
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VW 8
#define MR 6
#define HAS_VW 1
#else
#define VW 4
#define MR 6
#define HAS_VW 0
#endif

#define NV 2            /* vectors in a weight panel */
#define NR (NV * VW)    /* output columns in a weight panel */
#define TILE 16         /* cached positions in a KV tile, on every machine */
#define TV (TILE / VW)  /* vectors across a KV tile */

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef float vf_mem __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VW * 4), aligned(4), may_alias));

INLINE vf vload(const float *p) { return *(const vf_mem *)p; }
INLINE void vstore(float *p, vf x) { *(vf_mem *)p = x; }
INLINE vu vloadu32(const void *p) { return *(const vu_mem *)p; }
INLINE vf vzero(void) { return (vf){0}; }
INLINE vf vset(float x) { return x - (vf){0}; } /* x - 0 keeps the sign of a zero */
INLINE vu vsetu(uint32_t x) { return x + (vu){0}; }
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* a * b + c, rounded once where the machine can. */
INLINE vf vfma(vf a, vf b, vf c) {
#if HAS_VW && VW == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HAS_VW
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The larger of each two lanes; b where either is NaN. */
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }

/* Sum of the lanes, as a balanced tree: the same order every time. */
INLINE float vsum(vf x) {
    float lane[VW];
    memcpy(lane, &x, sizeof x);
    for (int w = VW / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) lane[i] += lane[i + w];
    return lane[0];
}

INLINE float vmax_lanes(vf x) {
    float lane[VW];
    memcpy(lane, &x, sizeof x);
    for (int w = VW / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) lane[i] = lane[i] > lane[i + w] ? lane[i] : lane[i + w];
    return lane[0];
}

/* 2^x for x < 127.5, relative error below 1e-7; exactly 1 at 0, exactly 0 below -126 (also for -inf), NaN for NaN.
 * x = n + r with |r| <= 1/2; minimax polynomial for (2^r - 1)/r fitted for this file. */
INLINE vf vexp2(vf x) {
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer held in the low bits */
    vf xc = vmax(vset(-126.0f), x); /* in this order NaN stays NaN */
    vf t = xc + magic;
    vf r = xc - (t - magic);
    vf q = vset(1.5475896693254058e-4f);
    q = vfma(q, r, vset(1.3400283159382684e-3f));
    q = vfma(q, r, vset(9.618005415295809e-3f));
    q = vfma(q, r, vset(5.550327742422335e-2f));
    q = vfma(q, r, vset(2.4022651332399966e-1f));
    q = vfma(q, r, vset(6.931472062884872e-1f));
    vf y = vfma(q, r, vset(1.0f));
    vi n = (vi)t - (vi)magic;
    y = y * (vf)((n + 127) << 23);
    return vselect(x < vset(-126.0f), vzero(), y);
}

/* e^x for x <= 88; used by SiLU and softmax. */
INLINE vf vexp(vf x) { return vexp2(x * vset(1.44269504088896341f)); }

/* e*ln2 + log(1 + f) for f in [-0.293, 0.415]; relative error below 2e-7. Polynomial fitted for this file. */
INLINE vf vlog_parts(vf e, vf f) {
    vf q = vset(-7.633652124064291e-2f);
    q = vfma(q, f, vset(1.276135687367678e-1f));
    q = vfma(q, f, vset(-1.316038064505025e-1f));
    q = vfma(q, f, vset(1.4201800226082156e-1f));
    q = vfma(q, f, vset(-1.662334275013753e-1f));
    q = vfma(q, f, vset(2.000122464693137e-1f));
    q = vfma(q, f, vset(-2.50008213659769e-1f));
    q = vfma(q, f, vset(3.3333331735905203e-1f));
    q = vfma(q, f, vset(-0.5f));
    vf log1p = vfma(q, f * f, f);
    /* ln2 in two parts: the high one has few bits, so e * high is exact. */
    return vfma(e, vset(0.693359375f), vfma(e, vset(-2.12194440e-4f), log1p));
}

/* x = 2^e * (1 + f), as vlog_parts takes it, for normal positive x. */
INLINE void vlog_split(vf x, vf *e, vf *f) {
    vi bits = (vi)x;
    vi shifted = bits - 0x3f3504f3; /* bits of sqrt(1/2): mantissa lands in [sqrt(1/2), sqrt(2)) */
    vi exponent = shifted >> 23;
    *e = __builtin_convertvector(exponent, vf);
    *f = (vf)(bits - (exponent << 23)) - vset(1.0f);
}

/* log(x) for normal positive x. */
INLINE vf vlog(vf x) {
    vf e, f;
    vlog_split(x, &e, &f);
    return vlog_parts(e, f);
}

#endif
