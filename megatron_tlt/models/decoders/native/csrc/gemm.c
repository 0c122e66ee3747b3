/* Packed matrix product for 1 to a few hundred rows.
 *
 * A weight W[N][K] is stored as panels of NR columns, [N/NR][K][NR]; in bf16 of cells (numbers.h), [N/NR][K/2][NR][2]. A kernel keeps M rows x NP panels of sums in registers and walks K once, so each output is one chain of
 * multiply-adds in ascending k, whatever M, NP, the number of rows or of threads: batch invariance by design.
 * Few rows take several panels at once (to hide the latency of the multiply-add), many rows take one.
 *
 * Weights come from memory while the multiply-adds run. The hardware prefetches four panels at once as fast as memory
 * delivers, fewer at half that speed, so kernels of fewer panels prefetch: one block of rows the same place of the next page,
 * where the hardware stops; several blocks, which go over a group of panels in turns, each its share of the next group.
 *
 * One call of a kernel does a run of panels and finishes them (bias, residual) in registers: at K = 128 a panel of 6
 * rows is 768 cycles of multiply-adds, and every hundred instructions between two panels is a gap of some 30 cycles.
 *
 * With AMX (bf16) a kernel is one panel of 32 columns times 1 to 32 rows: the tiles have as many rows as there are, and each
 * row's sums take the same 16 cells after one another, whatever the rows beside it. The weights are packed alike.
 */
#include "gemm.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"
#include "pool.h"

#if TLT_AMX
#define ROWS (2 * TILE_ROWS)
#else
#define ROWS MR
#endif
#define MAX_NP 4
#define MAX_M 12
#define UNROLL 4 /* steps over K */
#define CHUNK_BYTES 65536 /* weights that several row blocks go over before the next: a fraction of the L2 cache */
#define PAGE 1024 /* cells of a memory page */

/* Up to ROWS rows that pass over the weights together. */
typedef struct {
    long first, count;
    long ahead;       /* cells from weights in use to those that are prefetched */
    long turn, turns; /* one of `turns` loops over K prefetches, beginning with the `turn`th, from 1 */
} RowBlock;

typedef struct {
    const cell *a;     /* first row, first k */
    long a_stride;     /* all in cells */
    const cell *w;     /* first panel */
    long panel;
    long steps;        /* over K */
    long calls;        /* times NP panels */
    float *out;        /* first row, first column */
    long out_stride;   /* elements */
    const float *bias; /* of the first column, or NULL */
    int add;           /* the sums are added to `out` */
    const RowBlock *rows;
} KernelArgs;

/* Step `u` from the current one. Rows are addressed from one base per three rows, which fits the addressing modes
 * (base, +s, +2s). The shorter side is held in registers, the longer one passes through. */
INLINE void step(const int M, const int NP, const int u, vf (*acc)[MAX_NP * NV], const cell *const *base, long s,
                 const cell *const *w) {
    const int V = NP * NV;
    vc a[MAX_M], b[MAX_NP * NV];
    if (M >= V) {
        ALL for (int v = 0; v < V; v++) b[v] = column_at(w[v / NV] + u * NR + v % NV * VW);
        ALL for (int m = 0; m < M; m++) {
            a[m] = row_at(base[m / 3] + m % 3 * s + u);
            ALL for (int v = 0; v < V; v++) acc[m][v] = accumulate(acc[m][v], a[m], b[v]);
        }
    } else {
        ALL for (int m = 0; m < M; m++) a[m] = row_at(base[m / 3] + m % 3 * s + u);
        ALL for (int v = 0; v < V; v++) {
            b[v] = column_at(w[v / NV] + u * NR + v % NV * VW);
            ALL for (int m = 0; m < M; m++) acc[m][v] = accumulate(acc[m][v], a[m], b[v]);
        }
    }
}

/* Fetches the weights of one loop over K that lie `ahead` of the current ones into the L2 cache. */
INLINE void prefetch(const int NP, const cell *const *w, long ahead) {
    ALL for (int p = 0; p < NP; p++)
        ALL for (int i = 0; i < UNROLL * NR; i += 64 / (int)sizeof(cell)) __builtin_prefetch(w[p] + ahead + i, 0, 2);
}

/* acc[m][v] = sums over K of M rows and NP panels from `panels` on. */
INLINE void walk(const int M, const int NP, const KernelArgs *args, const cell *panels, vf (*acc)[MAX_NP * NV]) {
    const long s = args->a_stride;
    const cell *base[MAX_M / 3], *w[MAX_NP];
    ALL for (int r = 0; r < (M + 2) / 3; r++) base[r] = args->a + 3 * r * s;
    ALL for (int p = 0; p < NP; p++) w[p] = panels + p * args->panel;
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < NP * NV; v++) acc[m][v] = vzero();
    long left = args->steps, turn = args->rows->turn;
    for (; left >= UNROLL; left -= UNROLL) {
        if (NP < MAX_NP && --turn == 0) {
            prefetch(NP, w, args->rows->ahead);
            turn = args->rows->turns;
        }
        ALL for (int u = 0; u < UNROLL; u++) step(M, NP, u, acc, base, s, w);
        ALL for (int p = 0; p < NP; p++) w[p] += UNROLL * NR;
        ALL for (int r = 0; r < (M + 2) / 3; r++) base[r] += UNROLL;
    }
    for (; left > 0; left--) {
        step(M, NP, 0, acc, base, s, w);
        ALL for (int p = 0; p < NP; p++) w[p] += NR;
        ALL for (int r = 0; r < (M + 2) / 3; r++) base[r] += 1;
    }
}

INLINE void kernel(const int M, const int NP, const KernelArgs *args) {
    const int V = NP * NV;
    const cell *panels = args->w;
    const float *bias = args->bias;
    float *out = args->out;
    for (long call = 0; call < args->calls; call++) {
        vf acc[MAX_M][MAX_NP * NV]; /* only [M][V] is used, and lives in registers */
        walk(M, NP, args, panels, acc);
        ALL for (int m = 0; m < M; m++) {
            float *y = out + m * args->out_stride;
            if (args->add) {
                ALL for (int v = 0; v < V; v++) vstore(y + v * VW, vload(y + v * VW) + acc[m][v]);
            } else if (bias) {
                ALL for (int v = 0; v < V; v++) vstore(y + v * VW, acc[m][v] + vload(bias + v * VW));
            } else {
                ALL for (int v = 0; v < V; v++) vstore(y + v * VW, acc[m][v]);
            }
        }
        panels += NP * args->panel;
        out += NP * NR;
        if (bias) bias += NP * NR;
    }
}

#if TLT_AMX
static void multiply(const KernelArgs *args, long np) {
    (void)np; /* 1 */
    const long rows = args->rows->count, ahead = args->rows->turns == 1 ? PAGE : 0;
    const int is_plain = !args->add && !args->bias; /* the tiles' sums are the result */
    float sums[ROWS][NR] __attribute__((aligned(64)));
    configure_tiles(rows);
    for (long call = 0; call < args->calls; call++) {
        const cell *panel = args->w + call * args->panel;
        float *out = args->out + call * NR;
        tile_product(args->a, args->a_stride, rows, panel, args->steps, ahead, is_plain ? out : &sums[0][0],
                     is_plain ? args->out_stride : NR);
        for (long m = 0; m < rows && !is_plain; m++) {
            float *y = out + m * args->out_stride;
            for (int v = 0; v < NV; v++) {
                const vf sum = vload(sums[m] + v * VW);
                vstore(y + v * VW, args->add ? vload(y + v * VW) + sum : sum + vload(args->bias + call * NR + v * VW));
            }
        }
    }
}

INLINE long panels_per_call(long m) { return m > 0; }
#else
#define KERNEL(M, NP) \
    static __attribute__((noinline)) void kernel_##M##_##NP(const KernelArgs *a) { kernel(M, NP, a); }
KERNEL(1, 1) KERNEL(1, 2) KERNEL(1, 3) KERNEL(1, 4)
KERNEL(2, 1) KERNEL(2, 2) KERNEL(2, 3) KERNEL(2, 4)
KERNEL(3, 1) KERNEL(3, 2) KERNEL(3, 3) KERNEL(3, 4)
KERNEL(4, 1) KERNEL(4, 2) KERNEL(4, 3)
KERNEL(5, 1) KERNEL(5, 2) KERNEL(6, 1) KERNEL(6, 2)
KERNEL(7, 1) KERNEL(8, 1) KERNEL(9, 1) KERNEL(10, 1) KERNEL(11, 1) KERNEL(12, 1)
typedef void (*KernelFn)(const KernelArgs *);
static const KernelFn KERNELS[MAX_M][MAX_NP] = {
    {kernel_1_1, kernel_1_2, kernel_1_3, kernel_1_4},
    {kernel_2_1, kernel_2_2, kernel_2_3, kernel_2_4},
    {kernel_3_1, kernel_3_2, kernel_3_3, kernel_3_4},
    {kernel_4_1, kernel_4_2, kernel_4_3},
    {kernel_5_1, kernel_5_2}, {kernel_6_1, kernel_6_2},
    {kernel_7_1}, {kernel_8_1}, {kernel_9_1}, {kernel_10_1}, {kernel_11_1}, {kernel_12_1},
};

static void multiply(const KernelArgs *args, long np) { KERNELS[args->rows->count - 1][np - 1](args); }

/* Panels one kernel call may take for M rows: as many as the registers hold. */
INLINE long panels_per_call(long m) {
    long np = MR / m;
    return np > MAX_NP ? MAX_NP : (np < 1 ? 1 : np);
}
#endif

INLINE void silu_store(const Gemm *g, long row, long column, const float *gate, const float *up) {
    for (int v = 0; v < NV; v++) {
        vf x = vload(gate + v * VW);
        /* e^88 is the last that fits; larger ones must become 0, not the wrapped exponent's garbage. */
        vf y = x / (vset(1.0f) + vexp(-vmax(x, vset(-88.0f)))) * vload(up + v * VW);
        nstore((num *)g->out + row * g->out_stride + column + v * VW, y);
    }
}

/* out = (out if `add`) + rows times whole panels [panel, panel+np) + (bias if given). */
static void product(const Gemm *g, const RowBlock *rows, long panel, long np, float *out, long out_stride,
                    const float *bias, int add) {
    const long steps = cells(g->k), size = steps * NR;
    const cell *a = (const cell *)(g->a + rows->first * g->a_stride);
    KernelArgs args = {a, g->a_stride / PER, NULL, size, steps, 0, out, out_stride, bias, add, rows};
    for (long most = panels_per_call(rows->count), done; np > 0; np -= done, panel += done) {
        if (most > np) most = np;
        args.w = (const cell *)g->w + panel * size;
        args.calls = np / most;
        multiply(&args, most);
        done = args.calls * most;
        args.out += done * NR;
        if (args.bias) args.bias += done * NR;
    }
}

/* Rows times (gate, up) couples of panels: the sums pass through a tile that stays in the L1 cache. */
static void silu_block(const Gemm *g, const RowBlock *rows, long panel, long np) {
    float c[72 * NR] __attribute__((aligned(64)));
    /* 12 is a multiple of the panels of every kernel. */
    const long most = rows->count > 12 ? 2 : rows->count > 6 ? 6 : 12, stride = most * NR;
    for (long p = 0; p < np; p += most) {
        const long now = np - p < most ? np - p : most;
        product(g, rows, panel + p, now, c, stride, NULL, 0);
        for (long i = 0; i < rows->count; i++)
            for (long q = 0; q < now; q += 2) {
                const float *gate = c + i * stride + q * NR;
                silu_store(g, rows->first + i, (panel + p + q) / 2 * NR, gate, gate + NR);
            }
    }
#if K_STEP > 1
    const long width = g->n / 2, end = (width + K_STEP - 1) / K_STEP * K_STEP; /* up to which the next product reads */
    for (long i = 0; (panel + np) * NR >= g->n && i < rows->count; i++)
        memset((num *)g->out + (rows->first + i) * g->out_stride + width, 0, (size_t)(end - width) * sizeof(num));
#endif
}

/* Rows times panels [panel, panel+np). */
static void block(const Gemm *g, const RowBlock *rows, long panel, long np) {
    if (g->epilogue == EPI_SILU) {
        silu_block(g, rows, panel, np);
        return;
    }
    float *out = (float *)g->out + rows->first * g->out_stride + panel * NR;
    const float *bias = g->epilogue == EPI_BIAS && g->bias ? g->bias + panel * NR : NULL;
    const int cut = !g->out_is_padded && (panel + np) * NR > g->n; /* only EPI_STORE has unpadded rows (the logits) */
    product(g, rows, panel, np - cut, out, g->out_stride, bias, g->epilogue == EPI_ADD);
    if (cut) {
        float c[ROWS * NR] __attribute__((aligned(64)));
        const long last = panel + np - 1, left = g->n - last * NR;
        product(g, rows, last, 1, c, NR, NULL, 0);
        for (long i = 0; i < rows->count; i++)
            memcpy(out + i * g->out_stride + (np - 1) * NR, c + i * NR, (size_t)left * sizeof(float));
    }
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
    const long least = (panels_per_call(g->rows / c->row_blocks) + c->couple - 1) / c->couple;
    long group = CHUNK_BYTES / (cells(g->k) * NR * (long)sizeof(cell) * c->couple);
    if (group < least) group = least;
    if (b1 - b0 == 1) group = last - first; /* nothing is read twice */
    for (long p = first; p < last; p += group) {
        long np = last - p < group ? last - p : group;
        for (long b = b0; b < b1; b++) {
            const long r0 = b * g->rows / c->row_blocks, r1 = (b + 1) * g->rows / c->row_blocks;
            const long ahead = b1 - b0 == 1 ? PAGE : np * c->couple * cells(g->k) * NR;
            const RowBlock rows = {r0, r1 - r0, ahead, b - b0 + 1, b1 - b0};
            block(g, &rows, p * c->couple, np * c->couple);
        }
    }
#if TLT_AMX
    release_tiles();
#endif
}

static Cut uncut(const Gemm *g) {
    const long couple = g->epilogue == EPI_SILU ? 2 : 1;
    return (Cut){g, couple, ((g->n + NR - 1) / NR) / couple, (g->rows + ROWS - 1) / ROWS, 1, 1};
}

/* Panels are split first; rows only when there are too few panels for the team. Several parts a thread even out
 * disturbed cores. */
void tlt_gemm(const Gemm *g, int threads) {
    Cut c = uncut(g);
    if (threads > 1) c.parts = c.panels >= 16L * threads ? 4L * threads : threads;
    if (c.parts > c.panels) c.parts = c.panels;
    if (c.parts < threads) c.row_parts = (threads + c.parts - 1) / c.parts;
    if (c.row_parts > c.row_blocks) c.row_parts = c.row_blocks;
    tlt_parallel(c.parts * c.row_parts, gemm_unit, &c);
}

typedef struct {
    const Gemm *g;
    const Groups *groups;
    long parts; /* of a group */
} GroupCut;

/* Unit = one part of the panels of one group. */
static void group_unit(void *arg, long unit) {
    const GroupCut *c = arg;
    const long e = c->groups->which[unit / c->parts], first = c->groups->starts[e];
    Gemm g = *c->g;
    g.rows = c->groups->starts[e + 1] - first;
    g.a += first * g.a_stride;
    g.w += e * c->groups->w_size;
    const long size = g.epilogue == EPI_SILU ? sizeof(num) : sizeof(float);
    g.out = (char *)g.out + first * g.out_stride * size;
    Cut one = uncut(&g);
    one.parts = c->parts;
    gemm_unit(&one, unit % c->parts);
}

void tlt_gemm_groups(const Gemm *g, const Groups *groups, int threads) {
    const long panels = uncut(g).panels;
    GroupCut c = {g, groups, threads > 1 ? (4L * threads + groups->count - 1) / groups->count : 1};
    if (c.parts > panels) c.parts = panels;
    tlt_parallel(groups->count * c.parts, group_unit, &c);
}

int tlt_prepare(void) {
#if TLT_AMX && !defined(TLT_EMULATE)
    return syscall(SYS_arch_prctl, 0x1023, 18) != 0; /* ARCH_REQ_XCOMP_PERM, the tiles' data */
#else
    return 0;
#endif
}

const char *tlt_form(void) {
#if TLT_AMX
    return "AMX";
#elif HAS_VW && VW == 16 && defined(TLT_BF16) && defined(__AVX512BF16__)
    return "AVX-512 BF16";
#elif HAS_VW && VW == 16
    return "AVX-512";
#elif HAS_VW
    return "AVX2";
#else
    return "portable";
#endif
}
