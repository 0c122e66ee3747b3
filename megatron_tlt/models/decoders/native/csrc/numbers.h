/* The numbers of weights, KV cache and inputs of products: fp32, or bf16 in the library that TLT_BF16 builds.
 *
 * A cell is what one step over K takes of a column: one fp32 number, or a pair of bf16 numbers (k even, k odd). Sums are
 * fp32. Of a pair the even product is added first, each with one rounding; AVX-512 BF16 and AMX have instructions for
 * a pair with a rounding of their own, so a sum's bits depend on the processor, and never on the rows beside it.
 */
#ifndef TLT_NUMBERS_H
#define TLT_NUMBERS_H

#include "simd.h"
#include "tlt.h"

#ifdef TLT_BF16
#define PER 2 /* numbers of a cell */
typedef uint32_t cell;
typedef vu vc; /* VW cells */
#define K_STEP 32 /* packed weights and rows go up to a multiple of it, with zeros: AMX takes 16 cells at once */
#else
#define PER 1
typedef float cell;
typedef vf vc;
#define K_STEP 1
#endif

/* Cells of a row of k numbers of a packed weight. */
INLINE long cells(long k) { return (k + K_STEP - 1) / K_STEP * K_STEP / PER; }

/* A product's inner loop over registers is written out by the compiler: ALL goes before each loop over M or V. A step over
 * K multiplies VW columns of one operand with the same value of the other in all lanes. */
#define ALL _Pragma("GCC unroll 16")

/* Keeps a value in a register: compilers tend to load it again for each use, and loads are the bottleneck. */
INLINE vu in_register(vu x) {
#if HAS_VW
    __asm__("" : "+v"(x));
#endif
    return x;
}

INLINE vc column_at(const cell *p) { return (vc)in_register(vloadu32(p)); }

INLINE vc row_at(const cell *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return (vc)in_register(vsetu(x));
}

/* acc + a * b. The form of the instruction that overwrites the sum is spelt out: left to itself, GCC 12 picks others and
 * copies sums around, up to 1.3 times slower. */
INLINE vf accumulate_fp32(vf acc, vf a, vf b) {
#if HAS_VW
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#else
    return vfma(a, b, acc);
#endif
}

#ifdef TLT_BF16
INLINE vf even_of(vc pairs) { return (vf)(pairs << 16); }
INLINE vf odd_of(vc pairs) { return (vf)(pairs & 0xffff0000u); }

INLINE vf accumulate(vf acc, vc a, vc b) {
#if HAS_VW && VW == 16 && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = accumulate_fp32(acc, even_of(a), even_of(b));
    return accumulate_fp32(acc, odd_of(a), odd_of(b));
#endif
}

typedef uint16_t half_vector __attribute__((vector_size(VW * 2)));
typedef uint16_t half_mem __attribute__((vector_size(VW * 2), aligned(2), may_alias));

INLINE vf nload(const num *p) { return (vf)(__builtin_convertvector(*(const half_mem *)p, vu) << 16); }

/* To the nearest, ties to even; NaN stays NaN. */
INLINE void nstore(num *p, vf x) {
    const vu bits = (vu)x, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    const vu found = (vu)vselect(x == x, (vf)(rounded >> 16), (vf)vsetu(0x7fc0u));
    *(half_mem *)p = __builtin_convertvector(found, half_vector);
}

INLINE float widened(num x) {
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE num narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (num)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) : (num)0x7fc0u;
}
#else
INLINE vf accumulate(vf acc, vc a, vc b) { return accumulate_fp32(acc, a, b); }
INLINE vf nload(const num *p) { return vload(p); }
INLINE void nstore(num *p, vf x) { vstore(p, x); }
INLINE float widened(num x) { return x; }
INLINE num narrowed(float x) { return x; }
#endif

INLINE void widen(const num *from, long n, float *to) {
    long i = 0;
    for (; i + VW <= n; i += VW) vstore(to + i, nload(from + i));
    for (; i < n; i++) to[i] = widened(from[i]);
}

INLINE void narrow(const float *from, long n, num *to) {
    long i = 0;
    for (; i + VW <= n; i += VW) nstore(to + i, vload(from + i));
    for (; i < n; i++) to[i] = narrowed(from[i]);
}

#endif
