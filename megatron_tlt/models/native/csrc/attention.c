/* Paged attention with fixed order.
 *
 * The cache is made of tiles of 16 positions. A key tile is [D][16] (bf16: [D/2][16][2]): a product with a query
 * gives 16 scores at once and needs no horizontal sums. A value tile is [16][D] (bf16: [8][D][2]). Both are read
 * once for all query heads of a kv head and for several rows of a prefill chunk.
 *
 * A row's result depends on its own query and the cache up to its position only: the context is walked in chunks
 * that start at absolute positions 0, 512, 1024, ..., the maximum is carried from chunk to chunk, sums run in
 * ascending position, and positions past a row's own contribute exact zeros.
 *
 * A branch of a draft tree is cached in spare slots. Its rows are computed one by one over copies of the last tiles,
 * in which the row's path is laid out as plain decoding would have cached it: then the very same instructions run on
 * the very same numbers, and the row's result equals plain decoding's bit for bit.
 */
#include "attention.h"

#include <math.h>

#include "tlt.h"

#define MQ MR            /* queries (rows x heads) handled together */
#define CHUNK 512        /* positions */
#define CHUNK_TILES (CHUNK / TILE)
#define SCORE_TILES 4    /* key tiles a score kernel takes at once */
#define VALUE_VECTORS 4  /* vectors of D a value kernel takes at once */
#define MAX_V (SCORE_TILES * TV) /* vectors of sums for each query */
#define AHEAD 6          /* value tiles to prefetch ahead */
#define PATH_TILES ((TLT_MAX_BRANCH + TILE) / TILE + 1) /* tiles that a root and a branch under it may touch */

typedef struct {
    float score[MQ][CHUNK];
    float weight[MQ][CHUNK]; /* exp(score - max) as activations (fp32, or bf16 pairs in the first half) */
    float acc[MQ][TLT_MAX_HEAD_DIM];
    char query[MQ][TLT_MAX_HEAD_DIM * 4];
    float max[MQ];
    vf sum[MQ];
    /* The chunk's key tiles, then its value tiles, then repeats of the last: one list in order of use, so that each
     * kernel can prefetch what comes next. Blocks lie anywhere, the hardware cannot guess it. */
    const char *tile[2 * CHUNK_TILES + 2 * SCORE_TILES];
    long tiles;
} __attribute__((aligned(64))) Work;

/* Copies of the tiles from `first` on, with a branch's path in place. */
typedef struct {
    long first, count;
    char key[PATH_TILES][TILE * TLT_MAX_HEAD_DIM * 4], value[PATH_TILES][TILE * TLT_MAX_HEAD_DIM * 4];
} __attribute__((aligned(64))) Overlay;

/* One step over K of M queries, `stride` bytes apart, times V vectors that lie where `column` says. The shorter side is
 * held in registers, the longer one passes through. */
INLINE void attend_step(const int kind, const int M, const int V, vf (*acc)[MAX_V], const char *row, const long stride,
                        const char *const *column) {
    const int halves = act_halves(kind);
    ALL for (int half = 0; half < halves; half++, row += 4) {
        vf a[12], b[MAX_V];
        if (M >= V) {
            ALL for (int v = 0; v < V; v++) b[v] = act_column(kind, half, column[v]);
            ALL for (int m = 0; m < M; m++) {
                a[m] = act_row(row + m * stride);
                ALL for (int v = 0; v < V; v++) acc[m][v] = act_fma(kind, acc[m][v], a[m], b[v]);
            }
        } else {
            ALL for (int m = 0; m < M; m++) a[m] = act_row(row + m * stride);
            ALL for (int v = 0; v < V; v++) {
                b[v] = act_column(kind, half, column[v]);
                ALL for (int m = 0; m < M; m++) acc[m][v] = act_fma(kind, acc[m][v], a[m], b[v]);
            }
        }
    }
}

/* score[m][tile t .. t+NT) = query[m] . keys, for M queries. */
INLINE void score_kernel(const int kind, const int M, const int NT, Work *w, long t, long steps) {
    const int V = NT * TV;
    vf acc[12][MAX_V];
    const char *k[SCORE_TILES], *next[SCORE_TILES], *q = w->query[0];
    ALL for (int i = 0; i < NT; i++) {
        k[i] = w->tile[t + i];
        next[i] = w->tile[t + 2 * NT + i];
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < V; v++) acc[m][v] = vzero();
    for (long d = 0; d < steps; d++, q += act_step_bytes(kind)) {
        const char *column[MAX_V];
        ALL for (int v = 0; v < V; v++) column[v] = k[v / TV] + d * TILE * 4 + (v % TV) * VW * 4;
        ALL for (int i = 0; i < NT; i++) __builtin_prefetch(next[i] + d * TILE * 4, 0, 2);
        attend_step(kind, M, V, acc, q, sizeof w->query[0], column);
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < V; v++) vstore(&w->score[m][t * TILE + v * VW], acc[m][v]);
}

/* acc[m][first .. first + NC vectors) += weights[m] . values over positions [from, count) of the chunk. */
INLINE void value_kernel(const int kind, const int M, const int NC, Work *w, long first, long dim, long from,
                         long count) {
    vf acc[12][MAX_V];
    const long per_tile = kind == KIND_F32 ? TILE : TILE / 2, step_bytes = act_step_bytes(kind);
    const long steps = act_steps(kind, count), skip = kind == KIND_F32 ? from : from / 2;
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < NC; v++) acc[m][v] = vload(&w->acc[m][(first + v) * VW]);
    const char *p = (const char *)w->weight[0] + skip * step_bytes;
    for (long done = skip, inside = skip, t = 0; done < steps; t++, inside = 0) {
        const char *value = w->tile[w->tiles + t] + first * VW * 4 + inside * dim * 4;
        const long ahead = w->tile[w->tiles + t + AHEAD] - w->tile[w->tiles + t];
        const long end = done + per_tile - inside < steps ? done + per_tile - inside : steps;
        for (; done < end; done++, p += step_bytes, value += dim * 4) {
            const char *column[MAX_V];
            vu half_pair[VALUE_VECTORS];
            ALL for (int v = 0; v < NC; v++) {
                column[v] = value + v * VW * 4;
                if (v * VW % 16 == 0) __builtin_prefetch(column[v] + ahead, 0, 2); /* once a line */
            }
            if (kind != KIND_F32 && (2 * done + 1 == count || 2 * done < from)) {
                /* The pair's other position may never have been written: it must not even be multiplied by 0. */
                const uint32_t mine = 2 * done < from ? 0xffff0000u : 0xffffu;
                for (int v = 0; v < NC; v++) half_pair[v] = vloadu32(value + v * VW * 4) & mine;
                ALL for (int v = 0; v < NC; v++) column[v] = (const char *)&half_pair[v];
            }
            attend_step(kind, M, NC, acc, p, sizeof w->weight[0], column);
        }
    }
    ALL for (int m = 0; m < M; m++)
        ALL for (int v = 0; v < NC; v++) vstore(&w->acc[m][(first + v) * VW], acc[m][v]);
}

#define CASES(M, WIDE_T, WIDE_C) \
    static __attribute__((noinline)) void score_##M(int f32, Work *w, long tiles, long steps) { \
        long t = 0; \
        for (; t + WIDE_T <= tiles; t += WIDE_T) \
            if (f32) score_kernel(KIND_F32, M, WIDE_T, w, t, steps); \
            else score_kernel(KIND_BF16, M, WIDE_T, w, t, steps); \
        for (; t < tiles; t++) \
            if (f32) score_kernel(KIND_F32, M, 1, w, t, steps); \
            else score_kernel(KIND_BF16, M, 1, w, t, steps); \
    } \
    static __attribute__((noinline)) void value_##M(int f32, Work *w, long dim, long from, long count) { \
        long c = 0; \
        for (; c + WIDE_C <= dim / VW; c += WIDE_C) \
            if (f32) value_kernel(KIND_F32, M, WIDE_C, w, c, dim, from, count); \
            else value_kernel(KIND_BF16, M, WIDE_C, w, c, dim, from, count); \
        for (; c < dim / VW; c++) \
            if (f32) value_kernel(KIND_F32, M, 1, w, c, dim, from, count); \
            else value_kernel(KIND_BF16, M, 1, w, c, dim, from, count); \
    }

typedef void (*ScoreFn)(int, Work *, long, long);
typedef void (*ValueFn)(int, Work *, long, long, long);

/* As many sums as the registers hold: 32 with AVX-512, else 16. */
#if VW == 16
CASES(1, 4, 4) CASES(2, 4, 4) CASES(3, 4, 4) CASES(4, 4, 4)
#else
CASES(1, 4, 4) CASES(2, 3, 4) CASES(3, 2, 4) CASES(4, 1, 3)
#endif
#if MQ == 4
static const ScoreFn SCORE[MQ] = {score_1, score_2, score_3, score_4};
static const ValueFn VALUE[MQ] = {value_1, value_2, value_3, value_4};
#else
#if VW == 16
CASES(5, 4, 4) CASES(6, 4, 4)
#else
CASES(5, 1, 2) CASES(6, 1, 2)
#endif
#if MQ == 6
static const ScoreFn SCORE[MQ] = {score_1, score_2, score_3, score_4, score_5, score_6};
static const ValueFn VALUE[MQ] = {value_1, value_2, value_3, value_4, value_5, value_6};
#else
CASES(7, 2, 2) CASES(8, 2, 2) CASES(9, 2, 2) CASES(10, 2, 2) CASES(11, 2, 2) CASES(12, 2, 2)
static const ScoreFn SCORE[MQ] = {score_1, score_2, score_3, score_4, score_5, score_6,
                                  score_7, score_8, score_9, score_10, score_11, score_12};
static const ValueFn VALUE[MQ] = {value_1, value_2, value_3, value_4, value_5, value_6,
                                  value_7, value_8, value_9, value_10, value_11, value_12};
#endif
#endif

/* Turns the scores of query m into weights; of the chunk's `count` positions [from, valid) are the row's to see. */
static void soften(int kind, Work *w, long m, long dim, long from, long valid, long count, float scale) {
    float *score = w->score[m];
    const long padded = (count + TILE - 1) / TILE * TILE;
    if (valid <= from) {
        memset(w->weight[m], 0, (size_t)(padded * act_bytes(kind)));
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
        act_store(kind, w->weight[m], j, p);
    }
    w->sum[m] = sum;
}

INLINE long tile_of(const Attention *a, const int32_t *table, long head, long position) {
    return tile_index(a->kv_heads, a->block_size, head, table[position / a->block_size],
                      position % a->block_size / TILE);
}

static void find_tiles(const Attention *a, Work *w, long head, long start, long tiles, const int32_t *table,
                       const Overlay *over) {
    const long bytes = tile_bytes(a->kind, a->padded_dim);
    w->tiles = tiles;
    for (long t = 0; t < tiles; t++) {
        long index = tile_of(a, table, head, start + t * TILE);
        w->tile[t] = (const char *)a->k_plane + index * bytes;
        w->tile[tiles + t] = (const char *)a->v_plane + index * bytes;
    }
    for (long t = 0; over && t < tiles; t++) {
        long i = start / TILE + t - over->first;
        if (i < 0 || i >= over->count) continue;
        w->tile[t] = over->key[i];
        w->tile[tiles + t] = over->value[i];
    }
    for (long i = 0; i < 2 * SCORE_TILES; i++) w->tile[2 * tiles + i] = w->tile[2 * tiles - 1];
}

/* Copies the tiles from the lowest misplaced position of the path to the row's own, then the path into them. */
static void lay_path(const Attention *a, long head, const Span *s, Overlay *over) {
    const long bytes = tile_bytes(a->kind, a->padded_dim);
    over->first = s->path[2 * (s->path_len - 1)] / TILE;
    over->count = s->positions[0] / TILE - over->first + 1;
    for (long i = 0; i < over->count; i++) {
        long from = tile_of(a, s->block_table, head, (over->first + i) * TILE) * bytes;
        memcpy(over->key[i], (const char *)a->k_plane + from, (size_t)bytes);
        memcpy(over->value[i], (const char *)a->v_plane + from, (size_t)bytes);
    }
    for (long n = 0; n < s->path_len; n++) {
        const long position = s->path[2 * n], slot = s->path[2 * n + 1], i = position / TILE - over->first;
        const long block = slot / a->block_size, lane = slot % TILE;
        const long from = tile_index(a->kv_heads, a->block_size, head, block, slot % a->block_size / TILE) * bytes;
        const char *key = (const char *)a->k_plane + from, *value = (const char *)a->v_plane + from;
        tlt_copy_key(a->kind, over->key[i], position % TILE, key, lane, a->padded_dim);
        tlt_copy_value(a->kind, over->value[i], position % TILE, value, lane, a->padded_dim);
    }
}

/* `queries` queries: rows x heads of one group; query m belongs to row m / group_heads. */
static void attend_group(const Attention *a, Work *w, long queries, long group_heads, long head, const Span *s,
                         const Overlay *over) {
    const long rows = queries / group_heads, dim = a->padded_dim;
    const float scale = 1.44269504088896341f / sqrtf((float)a->head_dim); /* scores in powers of two */
    const int f32 = a->kind == KIND_F32;
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
        find_tiles(a, w, head, start, tiles, s->block_table, over);
        SCORE[queries - 1](f32, w, tiles, act_steps(a->kind, dim));
        for (long m = 0; m < queries; m++) {
            long valid = s->positions[m / group_heads] + 1 - start;
            soften(a->kind, w, m, dim, from, valid < count ? valid : count, count, scale);
        }
        VALUE[queries - 1](f32, w, dim, from, count);
    }
}

/* Normalises the sums of `queries` queries and writes them as activations. */
static void write_out(const Attention *a, const Work *w, long row, long queries, long first_head, long heads) {
    const long item = act_bytes(a->kind);
    for (long m = 0; m < queries; m++) {
        vf norm = vset(1.0f / vsum(w->sum[m]));
        long at = (row + m / heads) * a->out_stride + (first_head + m % heads) * a->head_dim;
        char tmp[TLT_MAX_HEAD_DIM * 4];
        for (long d = 0; d < a->padded_dim; d += VW) act_store(a->kind, tmp, d, vload(&w->acc[m][d]) * norm);
        memcpy((char *)a->out + at * item, tmp, (size_t)(a->head_dim * item));
    }
}

static void attend(const Attention *a, long row, long rows, long head, const Span *span, const Overlay *over) {
    Work w;
    const long group = a->heads / a->kv_heads, item = act_bytes(a->kind), q_bytes = a->padded_dim * item;
    const long most = group < MQ ? group : MQ;
    for (long g0 = 0; g0 < group; g0 += most) {
        long now = group - g0 < most ? group - g0 : most, first_head = head * group + g0;
        for (long m = 0; m < rows * now; m++) {
            long at = ((row + m / now) * a->heads + first_head + m % now) * a->padded_dim;
            memcpy(w.query[m], (const char *)a->q + at * item, (size_t)q_bytes);
        }
        attend_group(a, &w, rows * now, now, head, span, over);
        write_out(a, &w, row, rows * now, first_head, now);
    }
}

void tlt_attend(const Attention *a, long row, long rows, long head, const Span *span) {
    static __thread Overlay over; /* large, and plain decoding has no use for it: not on the stack */
    if (!span->path_len) {
        attend(a, row, rows, head, span, NULL);
        return;
    }
    lay_path(a, head, span, &over);
    attend(a, row, 1, head, span, &over);
}

void tlt_store_key(int kind, void *tile, long lane, long padded_dim, const float *key) {
    if (kind == KIND_F32) {
        float *k = (float *)tile + lane;
        for (long d = 0; d < padded_dim; d++) k[d * TILE] = key[d];
        return;
    }
    uint32_t *k = (uint32_t *)tile + lane;
    for (long d = 0; d < padded_dim; d += 2)
        k[d / 2 * TILE] = f32_to_bf16(key[d]) | (uint32_t)f32_to_bf16(key[d + 1]) << 16;
}

void tlt_store_value(int kind, void *tile, long lane, long padded_dim, const float *value) {
    if (kind == KIND_F32) {
        memcpy((float *)tile + lane * padded_dim, value, (size_t)padded_dim * sizeof(float));
        return;
    }
    uint16_t *v = (uint16_t *)tile + lane / 2 * padded_dim * 2 + lane % 2;
    for (long d = 0; d < padded_dim; d++) v[2 * d] = f32_to_bf16(value[d]);
}

void tlt_copy_key(int kind, void *tile, long lane, const void *from_tile, long from_lane, long padded_dim) {
    const long words = kind == KIND_F32 ? padded_dim : padded_dim / 2; /* a float, or a pair of bf16 */
    uint32_t *to = (uint32_t *)tile + lane;
    const uint32_t *from = (const uint32_t *)from_tile + from_lane;
    for (long d = 0; d < words; d++) to[d * TILE] = from[d * TILE];
}

void tlt_copy_value(int kind, void *tile, long lane, const void *from_tile, long from_lane, long padded_dim) {
    if (kind == KIND_F32) {
        memcpy((float *)tile + lane * padded_dim, (const float *)from_tile + from_lane * padded_dim,
               (size_t)padded_dim * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)tile + lane / 2 * padded_dim * 2 + lane % 2;
    const uint16_t *from = (const uint16_t *)from_tile + from_lane / 2 * padded_dim * 2 + from_lane % 2;
    for (long d = 0; d < padded_dim; d++) to[2 * d] = from[2 * d];
}
