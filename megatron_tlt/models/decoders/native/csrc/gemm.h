/* y[T][N] = a[T][K] * W[N][K]^T on packed panels, with the epilogue fused. */
#ifndef TLT_GEMM_H
#define TLT_GEMM_H

#include "numbers.h"

enum { EPI_STORE, EPI_BIAS, EPI_ADD, EPI_SILU };

typedef struct {
    int epilogue;
    long rows, n, k;         /* n: columns, for EPI_SILU twice the intermediate size as interleaved panels */
    const num *a;
    long a_stride;           /* elements between rows of a */
    const num *w;            /* packed panels */
    const float *bias;       /* EPI_BIAS: padded to panels, may be NULL */
    void *out;               /* float; of EPI_SILU, num */
    long out_stride;         /* elements */
    int out_is_padded;       /* rows of out may be written up to a whole panel */
} Gemm;

/* Runs the product on the open team; `threads` is its size and only guides how the work is cut. */
void tlt_gemm(const Gemm *g, int threads);

/* The same product for groups of rows with a weight each, in one stage: rows [starts[e], starts[e + 1]) of `a` and `out`
 * times the weight at w + e * w_size, for each of the `count` groups e in `which`. `g->rows` is not read. */
typedef struct {
    const int32_t *starts, *which;
    long count, w_size; /* elements */
} Groups;
void tlt_gemm_groups(const Gemm *g, const Groups *groups, int threads);

#endif
