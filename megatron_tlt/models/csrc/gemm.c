/* Packed matrix product for 1 to a few hundred rows.
 *
 * A weight W[N][K] is stored as panels of NR columns: fp32 [N/NR][K][NR], bf16 [N/NR][K/2][NR][2]. A kernel
 * keeps M rows x NP panels of sums in registers and walks K once, so each output is one chain of
 * multiply-adds in ascending k, whatever M, NP, the number of rows or of threads: batch invariance by design.
 * Few rows take several panels at once (to hide the latency of the multiply-add), many rows take one. Panels are read
 * straight through, which the hardware prefetches well: software prefetch gained nothing here (Zen 4).
 */
#include "gemm.h"

#include "pool.h"
#include "tlt.h"

#define MAX_NP 4

typedef struct {
    const char *a;   /* first row, first k */
    long a_stride;   /* bytes */
    const char *w;   /* first panel */
    long panel;      /* bytes */
    long steps;
    float *out;      /* [NP][M][NR] */
} KernelArgs;

/* Rows are addressed from one base per three rows, which fits the addressing modes (base, +s, +2s). */
INLINE void kernel(const int kind, const int M, const int NP, const KernelArgs *args) {
    vf acc[12][MAX_NP * NV]; /* only [M][NP * NV] is used, and lives in registers */
    const char *base[4];
    const char *w[MAX_NP];
    const long s = args->a_stride, step_bytes = act_step_bytes(kind);
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; i++) base[i] = args->a + 3 * i * s;
#pragma GCC unroll 16
    for (int p = 0; p < NP; p++) w[p] = args->w + p * args->panel;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int v = 0; v < NP * NV; v++) acc[m][v] = vzero();
    for (long i = 0; i < args->steps; i++) {
        vu b[MAX_NP * NV];
#pragma GCC unroll 16
        for (int p = 0; p < NP; p++) {
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) b[p * NV + v] = vloadu32(w[p] + v * VW * 4);
            w[p] += NR * 4;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 16
            for (int v = 0; v < NP * NV; v++)
                acc[m][v] = act_mac(kind, acc[m][v], base[m / 3] + (m % 3) * s, b[v]);
#pragma GCC unroll 16
        for (int r = 0; r < (M + 2) / 3; r++) base[r] += step_bytes;
    }
#pragma GCC unroll 16
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) vstore(args->out + (p * M + m) * NR + v * VW, acc[m][p * NV + v]);
}

#define KERNEL(kind, M, NP) \
    static __attribute__((noinline)) void kernel_##kind##_##M##_##NP(const KernelArgs *a) { kernel(kind, M, NP, a); }
#define KERNELS(kind) \
    KERNEL(kind, 1, 1) KERNEL(kind, 1, 2) KERNEL(kind, 1, 3) KERNEL(kind, 1, 4) \
    KERNEL(kind, 2, 1) KERNEL(kind, 2, 2) KERNEL(kind, 2, 3) KERNEL(kind, 2, 4) \
    KERNEL(kind, 3, 1) KERNEL(kind, 3, 2) KERNEL(kind, 3, 3) KERNEL(kind, 3, 4) \
    KERNEL(kind, 4, 1) KERNEL(kind, 4, 2) KERNEL(kind, 4, 3) \
    KERNEL(kind, 5, 1) KERNEL(kind, 5, 2) KERNEL(kind, 6, 1) KERNEL(kind, 6, 2) \
    KERNEL(kind, 7, 1) KERNEL(kind, 8, 1) KERNEL(kind, 9, 1) KERNEL(kind, 10, 1) KERNEL(kind, 11, 1) KERNEL(kind, 12, 1)
typedef void (*KernelFn)(const KernelArgs *);
#define N_(kind, M, NP) kernel_##kind##_##M##_##NP
#define TABLE(kind) { \
    {N_(kind, 1, 1), N_(kind, 1, 2), N_(kind, 1, 3), N_(kind, 1, 4)}, \
    {N_(kind, 2, 1), N_(kind, 2, 2), N_(kind, 2, 3), N_(kind, 2, 4)}, \
    {N_(kind, 3, 1), N_(kind, 3, 2), N_(kind, 3, 3), N_(kind, 3, 4)}, \
    {N_(kind, 4, 1), N_(kind, 4, 2), N_(kind, 4, 3), 0}, \
    {N_(kind, 5, 1), N_(kind, 5, 2), 0, 0}, {N_(kind, 6, 1), N_(kind, 6, 2), 0, 0}, \
    {N_(kind, 7, 1), 0, 0, 0}, {N_(kind, 8, 1), 0, 0, 0}, {N_(kind, 9, 1), 0, 0, 0}, \
    {N_(kind, 10, 1), 0, 0, 0}, {N_(kind, 11, 1), 0, 0, 0}, {N_(kind, 12, 1), 0, 0, 0}}

KERNELS(KIND_F32)
static const KernelFn F32_TABLE[12][MAX_NP] = TABLE(KIND_F32);
#if TLT_DPBF16
KERNELS(KIND_DP)
static const KernelFn BF16_TABLE[12][MAX_NP] = TABLE(KIND_DP);
#else
KERNELS(KIND_WIDE)
static const KernelFn BF16_TABLE[12][MAX_NP] = TABLE(KIND_WIDE);
#endif

/* Panels one kernel call may take for M rows: as many as the registers hold. */
INLINE long panels_per_call(long m) {
    long np = MR / m;
    return np > MAX_NP ? MAX_NP : (np < 1 ? 1 : np);
}

INLINE void silu_store(const Gemm *g, long row, long column, const float *gate, const float *up) {
    for (int v = 0; v < NV; v++) {
        vf x = vload(gate + v * VW);
        /* e^88 is the last that fits; what lies beyond must become 0, not the wrapped exponent's garbage. */
        vf y = x / (vset(1.0f) + vexp(-vmax(x, vset(-88.0f)))) * vload(up + v * VW);
        act_store(g->kind, g->out, row * g->out_stride + column + v * VW, y);
    }
}

/* Writes one row of one panel; `c` holds NR sums. */
INLINE void store_panel(const Gemm *g, long row, long panel, const float *c) {
    float *out = (float *)g->out + row * g->out_stride + panel * NR;
    long left = g->n - panel * NR;
    if (left < NR && !g->out_is_padded) {
        memcpy(out, c, (size_t)left * sizeof(float)); /* only EPI_STORE has unpadded rows (the logits) */
        return;
    }
    for (int v = 0; v < NV; v++) {
        vf x = vload(c + v * VW);
        if (g->epilogue == EPI_BIAS && g->bias) x = x + vload(g->bias + panel * NR + v * VW);
        if (g->epilogue == EPI_ADD) x = vload(out + v * VW) + x;
        vstore(out + v * VW, x);
    }
}

/* Rows [row, row+m) times panels [panel, panel+np). For EPI_SILU panels come as (gate, up) couples. */
static void block(const Gemm *g, long row, long m, long panel, long np) {
    float c[MAX_NP * MR * NR] __attribute__((aligned(64)));
    KernelArgs args;
    long step = act_steps(g->kind, g->k);
    args.a_stride = g->a_stride * act_bytes(g->kind);
    args.a = (const char *)g->a + row * args.a_stride;
    args.panel = step * NR * 4;
    args.steps = step;
    const KernelFn *table = g->kind == KIND_F32 ? F32_TABLE[m - 1] : BF16_TABLE[m - 1];
    long most = panels_per_call(m);
    for (long p = 0; p < np; p += most) {
        long now = np - p < most ? np - p : most;
        args.w = (const char *)g->w + (panel + p) * args.panel;
        args.out = c + p * m * NR;
        table[now - 1](&args);
    }
    if (g->epilogue == EPI_SILU) {
        for (long p = 0; p < np; p += 2)
            for (long i = 0; i < m; i++)
                silu_store(g, row + i, (panel + p) / 2 * NR, c + (p * m + i) * NR, c + ((p + 1) * m + i) * NR);
        return;
    }
    for (long p = 0; p < np; p++)
        for (long i = 0; i < m; i++) store_panel(g, row + i, panel + p, c + (p * m + i) * NR);
}

typedef struct {
    const Gemm *g;
    long couple, panels, row_blocks, parts, row_parts; /* panels counts couples */
} Cut;

/* Unit = one part of the panels x one part of the row blocks. */
static void gemm_unit(void *arg, long unit) {
    const Cut *c = arg;
    const Gemm *g = c->g;
    const long part = unit / c->row_parts, row_part = unit % c->row_parts;
    const long first = part * c->panels / c->parts, last = (part + 1) * c->panels / c->parts;
    const long b0 = row_part * c->row_blocks / c->row_parts, b1 = (row_part + 1) * c->row_blocks / c->row_parts;
    long group = panels_per_call(g->rows / c->row_blocks) / c->couple;
    if (group < 1) group = 1;
    for (long p = first; p < last; p += group) {
        long np = last - p < group ? last - p : group;
        for (long b = b0; b < b1; b++) {
            long r0 = b * g->rows / c->row_blocks, r1 = (b + 1) * g->rows / c->row_blocks;
            block(g, r0, r1 - r0, p * c->couple, np * c->couple);
        }
    }
}

/* Panels are split first; rows only when there are too few panels for the team. Several parts a thread even out
 * disturbed cores. */
void tlt_gemm(const Gemm *g, int threads) {
    const long couple = g->epilogue == EPI_SILU ? 2 : 1;
    Cut c = {g, couple, ((g->n + NR - 1) / NR) / couple, (g->rows + MR - 1) / MR, 1, 1};
    if (threads > 1) c.parts = c.panels >= 16L * threads ? 4L * threads : threads;
    if (c.parts > c.panels) c.parts = c.panels;
    if (c.parts < threads) c.row_parts = (threads + c.parts - 1) / c.parts;
    if (c.row_parts > c.row_blocks) c.row_parts = c.row_blocks;
    tlt_parallel(c.parts * c.row_parts, gemm_unit, &c);
}
