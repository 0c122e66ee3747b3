/* Paged attention with fixed order.
 *
 * The cache is made of tiles of 16 positions. A key tile is [D][16]: a product with a query gives 16 scores at once and
 * needs no horizontal sums. A value tile is [16][D]. In bf16 a cell (numbers.h) has two dimensions of a key, [D / 2][16][2],
 * and two positions of a value, [8][D][2]. Both are read once for all query heads of a kv head and for several
 * rows of a prefill chunk.
 *
 * A row's result depends on its own query and the cache up to its position only: the context is walked in chunks
 * that start at absolute positions 0, 512, 1024, ..., the maximum is carried from chunk to chunk, sums run in
 * ascending position, and positions past a row's own contribute exact zeros.
 */
#include "attention.h"

#include <math.h>

#define MQ MR            /* queries (rows x heads) handled together */
#define CHUNK 512        /* positions */
#define CHUNK_TILES (CHUNK / TILE)
#define SCORE_TILES 4    /* key tiles a score kernel takes at once */
#define VALUE_VECTORS 4  /* vectors of D a value kernel takes at once */
#define MAX_V (SCORE_TILES * TV) /* vectors of sums for each query */
#define AHEAD 6          /* value tiles to prefetch ahead */

typedef struct {
    float score[MQ][CHUNK];
    num weight[MQ][CHUNK]; /* exp(score - max) */
    float acc[MQ][TLT_MAX_HEAD_DIM];
    num query[MQ][TLT_MAX_HEAD_DIM];
    float max[MQ];
    vf sum[MQ];
    /* The chunk's key tiles, then its value tiles, then repeats of the last: one list in order of use, so that each
     * kernel can prefetch the next block. Blocks lie anywhere, so the hardware cannot. */
    const num *tile[2 * CHUNK_TILES + 2 * SCORE_TILES];
    long tiles;
} __attribute__((aligned(64))) Work;

/* One step over K of M queries, `stride` apart, times V vectors that lie where `column` says. The shorter side is held in
 * registers, the longer one passes through. */
INLINE void attend_step(const int M, const int V, vf (*acc)[MAX_V], const cell *row, const long stride,
                        const cell *const *column) {
    vc a[12], b[MAX_V];
    if (M >= V) {
        ALL for (int v = 0; v < V; v++) b[v] = column_at(column[v]);
        ALL for (int m = 0; m < M; m++) {
            a[m] = row_at(row + m * stride);
            ALL for (int v = 0; v < V; v++) acc[m][v] = accumulate(acc[m][v], a[m], b[v]);
        }
    } else {
        ALL for (int m = 0; m < M; m++) a[m] = row_at(row + m * stride);
        ALL for (int v = 0; v < V; v++) {
            b[v] = column_at(column[v]);
            ALL for (int m = 0; m < M; m++) acc[m][v] = accumulate(acc[m][v], a[m], b[v]);
        }
    }
}

/* score[m][tile t .. t+NT) = query[m] . keys of `dim` values, for M queries. */
INLINE void score_kernel(const int M, const int NT, Work *w, long t, long dim) {
    const int V = NT * TV;
    vf acc[12][MAX_V];
    const cell *k[SCORE_TILES], *next[SCORE_TILES], *q = (const cell *)w->query[0];
    ALL for (int i = 0; i < NT; i++) {
        k[i] = (const cell *)w->tile[t + i];
        next[i] = (const cell *)w->tile[t + 2 * NT + i];
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < V; v++) acc[m][v] = vzero();
    for (long d = 0; d < dim / PER; d++, q++) {
        const cell *column[MAX_V];
        ALL for (int v = 0; v < V; v++) column[v] = k[v / TV] + d * TILE + (v % TV) * VW;
        ALL for (int i = 0; i < NT; i++) __builtin_prefetch(next[i] + d * TILE, 0, 2);
        attend_step(M, V, acc, q, TLT_MAX_HEAD_DIM / PER, column);
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < V; v++) vstore(&w->score[m][t * TILE + v * VW], acc[m][v]);
}

#if PER == 2
/* Points `column` at copies of its cells without a position that shares them, but is not to be read: its weight is 0, and
 * what lies there may be anything. */
INLINE void mask_cells(const int V, const cell **column, cell keep, cell *copy) {
    ALL for (int v = 0; v < V; v++) {
        for (int i = 0; i < VW; i++) copy[v * VW + i] = column[v][i] & keep;
        column[v] = copy + v * VW;
    }
}
#endif

/* acc[m][first .. first + NC vectors) += weights[m] . values over positions [from, count) of the chunk. */
INLINE void value_kernel(const int M, const int NC, Work *w, long first, long dim, long from, long count) {
    vf acc[12][MAX_V];
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < NC; v++) acc[m][v] = vload(&w->acc[m][(first + v) * VW]);
    const long begin = from / PER, cells_in_tile = TILE / PER, last = (count + PER - 1) / PER;
    const cell *p = (const cell *)w->weight[0] + begin;
    for (long done = begin, inside = begin, t = 0; done < last; t++, inside = 0) {
        const cell *value = (const cell *)w->tile[w->tiles + t] + first * VW + inside * dim;
        const long ahead = (w->tile[w->tiles + t + AHEAD] - w->tile[w->tiles + t]) / PER;
        const long end = done + cells_in_tile - inside < last ? done + cells_in_tile - inside : last;
        for (; done < end; done++, p++, value += dim) {
            const cell *column[MAX_V];
            ALL for (int v = 0; v < NC; v++) {
                column[v] = value + v * VW;
                if (v * VW % 16 == 0) __builtin_prefetch(column[v] + ahead, 0, 2); /* once a line */
            }
#if PER == 2
            cell copy[MAX_V * VW];
            if (done == begin && from % PER) mask_cells(NC, column, 0xffff0000u, copy);
            if (done == last - 1 && count % PER) mask_cells(NC, column, 0x0000ffffu, copy);
#endif
            attend_step(M, NC, acc, p, CHUNK / PER, column);
        }
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < NC; v++) vstore(&w->acc[m][(first + v) * VW], acc[m][v]);
}

/* As many sums as the registers hold beside their factors: of 32 vectors with AVX-512, else of 16. */
#define SUMS (VW == 16 ? 24 : 12)
#define FIT(wide, most) ((wide) > (most) ? (most) : (wide) < 1 ? 1 : (wide))

#define CASE(M) \
    static __attribute__((noinline)) void score_##M(Work *w, long tiles, long dim) { \
        enum { WIDE = FIT(SUMS / (M * TV), SCORE_TILES) }; \
        long t = 0; \
        for (; t + WIDE <= tiles; t += WIDE) score_kernel(M, WIDE, w, t, dim); \
        for (; t < tiles; t++) score_kernel(M, 1, w, t, dim); \
    } \
    static __attribute__((noinline)) void value_##M(Work *w, long dim, long from, long count) { \
        enum { WIDE = FIT(SUMS / M, VALUE_VECTORS) }; \
        long c = 0; \
        for (; c + WIDE <= dim / VW; c += WIDE) value_kernel(M, WIDE, w, c, dim, from, count); \
        for (; c < dim / VW; c++) value_kernel(M, 1, w, c, dim, from, count); \
    }

typedef void (*ScoreFn)(Work *, long, long);
typedef void (*ValueFn)(Work *, long, long, long);
CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MQ == 12
CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
static const ScoreFn SCORE[MQ] = {score_1, score_2, score_3, score_4, score_5, score_6,
                                  score_7, score_8, score_9, score_10, score_11, score_12};
static const ValueFn VALUE[MQ] = {value_1, value_2, value_3, value_4, value_5, value_6,
                                  value_7, value_8, value_9, value_10, value_11, value_12};
#else
static const ScoreFn SCORE[MQ] = {score_1, score_2, score_3, score_4, score_5, score_6};
static const ValueFn VALUE[MQ] = {value_1, value_2, value_3, value_4, value_5, value_6};
#endif

/* Turns the scores of query m into weights; of the chunk's `count` positions [from, valid) are the row's to see. A score
 * that is NaN or +inf makes the row's sum NaN, and with it the row. */
static void soften(Work *w, long m, long dim, long from, long valid, long count, float scale) {
    float *score = w->score[m];
    const long padded = (count + TILE - 1) / TILE * TILE;
    if (valid <= from) {
        memset(w->weight[m], 0, (size_t)padded * sizeof(num));
        return;
    }
    for (long j = 0; j < from; j++) score[j] = -INFINITY;
    for (long j = valid; j < padded; j++) score[j] = -INFINITY;
    vf top = vload(score);
    for (long j = VW; j < padded; j += VW) top = vmax(top, vload(score + j));
    float old = w->max[m], now = vmax_lanes(top);
    if (old > now) now = old;
    if (old != now && old != -INFINITY) {
        vf shrink = vexp2(vset((old - now) * scale));
        for (long d = 0; d < dim; d += VW) vstore(&w->acc[m][d], vload(&w->acc[m][d]) * shrink);
        w->sum[m] = w->sum[m] * shrink;
    }
    w->max[m] = now;
    vf sum = w->sum[m], peak = vset(now), factor = vset(scale);
    for (long j = 0; j < padded; j += VW) {
        vf p = vexp2((vload(score + j) - peak) * factor);
        sum = sum + p;
        nstore(w->weight[m] + j, p);
    }
    w->sum[m] = sum;
}

INLINE long tile_of(const Attention *a, const int32_t *table, long head, long position) {
    return tile_index(a->kv_heads, a->block_size, head, table[position / a->block_size],
                      position % a->block_size / TILE);
}

static void find_tiles(const Attention *a, Work *w, long head, long start, long tiles, const int32_t *table) {
    const long size = tile_size(a->padded_dim);
    w->tiles = tiles;
    for (long t = 0; t < tiles; t++) {
        long index = tile_of(a, table, head, start + t * TILE);
        w->tile[t] = a->k_plane + index * size;
        w->tile[tiles + t] = a->v_plane + index * size;
    }
    for (long i = 0; i < 2 * SCORE_TILES; i++) w->tile[2 * tiles + i] = w->tile[2 * tiles - 1];
}

/* `queries` queries: rows x heads of one group; query m belongs to row m / group_heads. */
static void attend_group(const Attention *a, Work *w, long queries, long group_heads, long head, const Span *s) {
    const long rows = queries / group_heads, dim = a->padded_dim;
    const float scale = 1.44269504088896341f / sqrtf((float)a->head_dim); /* scores in powers of two */
    long context = 0;
    for (long r = 0; r < rows; r++) context = s->positions[r] + 1 > context ? s->positions[r] + 1 : context;
    for (long m = 0; m < queries; m++) {
        w->max[m] = -INFINITY;
        w->sum[m] = vzero();
        memset(w->acc[m], 0, (size_t)dim * sizeof(float));
    }
    for (long start = s->first_visible / TILE * TILE, end; start < context; start = end) {
        end = (start / CHUNK + 1) * CHUNK;
        if (end > context) end = context;
        long count = end - start, tiles = (count + TILE - 1) / TILE;
        long from = s->first_visible > start ? s->first_visible - start : 0;
        find_tiles(a, w, head, start, tiles, s->block_table);
        SCORE[queries - 1](w, tiles, dim);
        for (long m = 0; m < queries; m++) {
            long valid = s->positions[m / group_heads] + 1 - start;
            soften(w, m, dim, from, valid < count ? valid : count, count, scale);
        }
        VALUE[queries - 1](w, dim, from, count);
    }
}

/* Normalises the sums of `queries` queries and writes them. */
static void write_out(const Attention *a, const Work *w, long row, long queries, long first_head, long heads) {
    for (long m = 0; m < queries; m++) {
        vf norm = vset(1.0f / vsum(w->sum[m]));
        long at = (row + m / heads) * a->out_stride + (first_head + m % heads) * a->head_dim;
        float tmp[TLT_MAX_HEAD_DIM];
        for (long d = 0; d < a->padded_dim; d += VW) vstore(tmp + d, vload(&w->acc[m][d]) * norm);
        narrow(tmp, a->head_dim, a->out + at);
    }
}

void tlt_attend(const Attention *a, long row, long rows, long head, const Span *span) {
    Work w;
    const long group = a->heads / a->kv_heads;
    const long most = group < MQ ? group : MQ;
    for (long g0 = 0; g0 < group; g0 += most) {
        long now = group - g0 < most ? group - g0 : most, first_head = head * group + g0;
        for (long m = 0; m < rows * now; m++) {
            long at = ((row + m / now) * a->heads + first_head + m % now) * a->padded_dim;
            memcpy(w.query[m], a->q + at, (size_t)a->padded_dim * sizeof(num));
        }
        attend_group(a, &w, rows * now, now, head, span);
        write_out(a, &w, row, rows * now, first_head, now);
    }
}

void tlt_store_key(num *tile, long lane, long padded_dim, const float *key) {
    for (long d = 0; d < padded_dim; d++) tile[(d / PER * TILE + lane) * PER + d % PER] = narrowed(key[d]);
}

void tlt_store_value(num *tile, long lane, long padded_dim, const float *value) {
    num *at = tile + lane / PER * padded_dim * PER + lane % PER;
    for (long d = 0; d < padded_dim; d++) at[d * PER] = narrowed(value[d]);
}
