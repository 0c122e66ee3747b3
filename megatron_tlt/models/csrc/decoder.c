/* One forward pass: embedding, layers, final norm and LM head, by a team of threads.
 *
 * Rows are processed in chunks of at most max_rows (a later chunk sees the keys of an earlier one through the
 * cache). Within a chunk the calling thread runs stage after stage, each a set of units shared by the team (pool.c):
 *
 *   embed+norm | qkv | rope, cache write | attention | o (+residual) | norm | gate, up, silu | down (+residual)
 *              ^-------------------------------- once a layer ---------------------------------------------^
 *
 * Under tensor parallelism o and down go to `part`, the caller sums it over the ranks, then it is added.
 * The residual stream is fp32 in both types; inputs of matrix products are rounded to the compute type.
 */
#include "tlt.h"

#include <math.h>

#include "attention.h"
#include "gemm.h"
#include "pool.h"

typedef struct {
    const TltModel *m;
    const TltStep *s;
    TltAllReduce all_reduce;
    int kind, failed, threads;
    long hp, dp, qkv_n, qkv_stride, q_stride, att_n, att_stride, mid_stride; /* row lengths, elements */
    long first, rows;  /* this chunk */
    long units, picked;
    long layer;             /* the current layer */
    const float *norm;      /* weight of the coming norm, or NULL */
} Run;

static long pad64(long n) { return (n + 63) / 64 * 64; }

/* out = x * rsqrt(mean(x^2) + eps) * weight, over `n` values stored with zero padding up to `padded`. */
static void rms_norm(const float *x, const float *weight, long n, long padded, float eps, int kind, void *out,
                     long at) {
    vf sum = vzero();
    for (long i = 0; i < padded; i += VW) sum = vfma(vload(x + i), vload(x + i), sum);
    vf scale = vset(1.0f / sqrtf(vsum(sum) / (float)n + eps));
    for (long i = 0; i < padded; i += VW) act_store(kind, out, at + i, vload(x + i) * scale * vload(weight + i));
}

static void norm_row(Run *r, long row, const float *weight) {
    rms_norm(r->m->resid + row * r->hp, weight, r->m->hidden, r->hp, r->m->eps, r->kind, r->m->x, row * r->hp);
}

static void embed_unit(void *arg, long row) {
    Run *r = arg;
    const TltModel *m = r->m;
    float *out = m->resid + row * r->hp;
    long token = r->s->token_ids[r->first + row];
    memset(out, 0, (size_t)r->hp * sizeof(float));
    if (m->is_bf16) {
        const uint16_t *e = (const uint16_t *)m->embed + token * m->hidden;
        for (long i = 0; i < m->hidden; i++) out[i] = bf16_to_f32(e[i]);
    } else {
        memcpy(out, (const float *)m->embed + token * m->hidden, (size_t)m->hidden * sizeof(float));
    }
    norm_row(r, row, m->layer[0].input_norm);
}

/* One head: optional norm, rotation of the two halves; `out` is zero-padded to Dp. */
static void rotate(const Run *r, const float *in, const float *weight, const float *rope, float *out) {
    const long d = r->m->head_dim, half = d / 2;
    float x[TLT_MAX_HEAD_DIM] = {0}, w[TLT_MAX_HEAD_DIM] = {0}, y[TLT_MAX_HEAD_DIM];
    memcpy(x, in, (size_t)d * sizeof(float));
    if (weight) {
        memcpy(w, weight, (size_t)d * sizeof(float));
        rms_norm(x, w, d, r->dp, r->m->eps, KIND_F32, y, 0);
        memcpy(x, y, (size_t)d * sizeof(float));
    }
    for (long i = 0; i < half; i++) {
        out[i] = x[i] * rope[i] - x[i + half] * rope[half + i];
        out[i + half] = x[i + half] * rope[i] + x[i] * rope[half + i];
    }
    memset(out + d, 0, (size_t)(r->dp - d) * sizeof(float));
}

static char *kv_plane(const Run *r, long layer, long which) {
    const TltStep *s = r->s;
    long tiles = (long)s->num_blocks * r->m->kv_heads * (s->block_size / TILE);
    return (char *)s->kv + (layer * 2 + which) * tiles * tile_bytes(r->kind, r->dp);
}

/* Unit = one row: rotates its queries and its keys, writes keys and values into the cache. */
static void rope_unit(void *arg, long row) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const TltLayer *l = &m->layer[r->layer];
    const long d = m->head_dim, bytes = tile_bytes(r->kind, r->dp);
    char *keys = kv_plane(r, r->layer, 0), *values = kv_plane(r, r->layer, 1);
    const float *in = m->qkv_out + row * r->qkv_stride;
    const float *rope = m->rope + (long)s->positions[r->first + row] * d;
    const long slot = s->slots[r->first + row], block = slot / s->block_size, offset = slot % s->block_size;
    float tmp[TLT_MAX_HEAD_DIM];
    for (long h = 0; h < m->heads; h++) {
        rotate(r, in + h * d, l->q_norm, rope, tmp);
        long at = row * r->q_stride + h * r->dp;
        for (long i = 0; i < r->dp; i += VW) act_store(r->kind, m->q, at + i, vload(tmp + i));
    }
    for (long h = 0; h < m->kv_heads; h++) {
        long tile = tile_index(m->kv_heads, s->block_size, h, block, offset / TILE);
        rotate(r, in + (m->heads + h) * d, l->k_norm, rope, tmp);
        tlt_store_key(r->kind, keys + tile * bytes, offset % TILE, r->dp, tmp);
        memcpy(tmp, in + (m->heads + m->kv_heads + h) * d, (size_t)d * sizeof(float));
        memset(tmp + d, 0, (size_t)(r->dp - d) * sizeof(float));
        tlt_store_value(r->kind, values + tile * bytes, offset % TILE, r->dp, tmp);
    }
}

/* Unit = some rows of one sequence x one kv head. */
static void attention_unit(void *arg, long unit) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const int32_t *u = m->units + unit / m->kv_heads * 3;
    Attention a = {r->kind, m->heads, m->kv_heads, m->head_dim, r->dp, s->num_blocks, s->block_size,
                   kv_plane(r, r->layer, 0), kv_plane(r, r->layer, 1), m->q, m->att, r->att_stride};
    tlt_attend(&a, u[0], u[1], unit % m->kv_heads, s->positions + r->first + u[0],
               s->block_tables + (long)u[2] * s->max_blocks);
}

static void linear(Run *r, const void *a, long a_stride, long k, const void *w, long n, int epilogue,
                   const float *bias, void *out, long out_stride) {
    Gemm g = {r->kind, epilogue, r->rows, n, k, a, a_stride, w, bias, out, out_stride, 1};
    tlt_gemm(&g, r->threads);
}

/* residual += part (tensor parallel only), then the coming norm. */
static void norm_unit(void *arg, long row) {
    Run *r = arg;
    float *x = r->m->resid + row * r->hp;
    if (r->m->tp > 1)
        for (long i = 0; i < r->hp; i += VW) vstore(x + i, vload(x + i) + vload(r->m->part + row * r->hp + i));
    if (r->norm) norm_row(r, row, r->norm);
}

/* Ends a half layer: the sum over the ranks, the residual, the norm with `weight` (NULL: none). */
static void finish_half(Run *r, const float *weight) {
    if (r->m->tp > 1 && r->all_reduce(r->m->part, r->rows * r->hp)) r->failed = 1;
    r->norm = weight;
    if (weight || r->m->tp > 1) tlt_parallel(r->rows, norm_unit, r);
}

static void run_layer(Run *r, long index) {
    const TltModel *m = r->m;
    const TltLayer *l = &m->layer[index];
    const int add = m->tp > 1 ? EPI_STORE : EPI_ADD;
    const long gate_up_n = 2 * (((long)m->inter + NR - 1) / NR) * NR;
    float *sum = m->tp > 1 ? m->part : m->resid;
    r->layer = index;
    linear(r, m->x, r->hp, m->hidden, l->qkv, r->qkv_n, EPI_BIAS, l->qkv_bias, m->qkv_out, r->qkv_stride);
    tlt_parallel(r->rows, rope_unit, r);
    tlt_parallel(r->units * m->kv_heads, attention_unit, r);
    linear(r, m->att, r->att_stride, r->att_n, l->o, m->hidden, add, NULL, sum, r->hp);
    finish_half(r, l->post_norm);
    if (r->failed) return;
    linear(r, m->x, r->hp, m->hidden, l->gate_up, gate_up_n, EPI_SILU, NULL, m->mid, r->mid_stride);
    linear(r, m->mid, r->mid_stride, m->inter, l->down, m->hidden, add, NULL, sum, r->hp);
    finish_half(r, index + 1 < m->layers ? m->layer[index + 1].input_norm : NULL);
}

/* Unit = one wanted row: the final norm, compacted into x, and the hidden state for the caller. */
static void final_norm_unit(void *arg, long i) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const long out = m->picked[2 * i], row = m->picked[2 * i + 1], at = i * r->hp, item = act_bytes(r->kind);
    rms_norm(m->resid + row * r->hp, m->final_norm, m->hidden, r->hp, m->eps, r->kind, m->x, at);
    if (r->kind == KIND_WIDE) {
        uint16_t *hidden = (uint16_t *)r->s->hidden + out * m->hidden;
        for (long k = 0; k < m->hidden; k++) hidden[k] = f32_to_bf16(((const float *)m->x)[at + k]);
    } else {
        memcpy((char *)r->s->hidden + out * m->hidden * item, (char *)m->x + at * item, (size_t)(m->hidden * item));
    }
}

/* Final norm and LM head of the picked rows. Consecutive results are written in place in one product; rows are
 * usually asked for in ascending order, so one run is usual. */
static void head_of_picked(Run *r) {
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    tlt_parallel(r->picked, final_norm_unit, r);
    for (long i = 0, j; i < r->picked; i = j) {
        for (j = i + 1; j < r->picked && m->picked[2 * j] == m->picked[2 * j - 2] + 1;) j++;
        Gemm g = {r->kind, EPI_STORE, j - i, m->vocab, m->hidden, (char *)m->x + i * r->hp * act_bytes(r->kind),
                  r->hp, m->head, NULL, s->logits + m->picked[2 * i] * s->logits_stride, s->logits_stride, 0};
        tlt_gemm(&g, r->threads);
    }
}

/* Picks this chunk's wanted rows, at most max_rows (the size of x) at a time. */
static void head(Run *r) {
    const TltStep *s = r->s;
    r->picked = 0;
    for (long i = 0; i < s->logits_rows; i++) {
        long row = s->logit_rows[i] - r->first;
        if (row < 0 || row >= r->rows) continue;
        r->m->picked[2 * r->picked] = (int32_t)i;
        r->m->picked[2 * r->picked + 1] = (int32_t)row;
        if (++r->picked < r->m->max_rows) continue;
        head_of_picked(r);
        r->picked = 0;
    }
    if (r->picked) head_of_picked(r);
}

/* Cuts the chunk into attention units: up to MR / (query heads per kv head) rows of one sequence. */
static void plan_chunk(Run *r) {
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const long group = m->heads / m->kv_heads, most = group >= MR ? 1 : MR / group, last = r->first + r->rows;
    r->units = 0;
    for (long seq = 0; seq < s->seqs; seq++) {
        long a = s->query_start[seq] > r->first ? s->query_start[seq] : r->first;
        long b = s->query_start[seq + 1] < last ? s->query_start[seq + 1] : last;
        for (; a < b; a += most, r->units++) {
            int32_t *u = m->units + 3 * r->units;
            u[0] = (int32_t)(a - r->first);
            u[1] = (int32_t)(b - a < most ? b - a : most);
            u[2] = (int32_t)seq;
        }
    }
}

static void run_chunks(Run *r) {
    for (long first = 0; first < r->s->tokens; first += r->m->max_rows) {
        long left = r->s->tokens - first;
        r->first = first;
        r->rows = left < r->m->max_rows ? left : r->m->max_rows;
        plan_chunk(r);
        tlt_parallel(r->rows, embed_unit, r);
        for (long l = 0; l < r->m->layers && !r->failed; l++) run_layer(r, l);
        if (r->failed) return;
        head(r);
    }
}

/* Everything that could make C read or write outside its memory. */
static int check(const TltModel *m, const TltStep *s) {
    if (s->block_size < TILE || s->block_size % TILE) return TLT_BAD_SHAPE;
    if (m->head_dim > TLT_MAX_HEAD_DIM || m->head_dim % 2 || m->hidden % 2) return TLT_BAD_SHAPE;
    if (s->query_start[0] != 0 || s->query_start[s->seqs] != s->tokens) return TLT_BAD_SHAPE;
    for (long i = 0; i < s->tokens; i++) {
        if (s->token_ids[i] < 0 || s->token_ids[i] >= m->embed_rows) return TLT_BAD_TOKEN;
        if (s->positions[i] < 0 || s->positions[i] >= m->rope_len) return TLT_BAD_POSITION;
        if (s->slots[i] < 0 || s->slots[i] >= (long)s->num_blocks * s->block_size) return TLT_BAD_SLOT;
    }
    for (long q = 0; q < s->seqs; q++) {
        long context = 0;
        if (s->query_start[q + 1] < s->query_start[q]) return TLT_BAD_SHAPE;
        for (long i = s->query_start[q]; i < s->query_start[q + 1]; i++)
            context = s->positions[i] >= context ? s->positions[i] + 1L : context;
        long blocks = (context + s->block_size - 1) / s->block_size;
        if (blocks > s->max_blocks) return TLT_BAD_BLOCK;
        for (long b = 0; b < blocks; b++) {
            int32_t id = s->block_tables[q * s->max_blocks + b];
            if (id < 0 || id >= s->num_blocks) return TLT_BAD_BLOCK;
        }
    }
    for (long i = 0; i < s->logits_rows; i++)
        if (s->logit_rows[i] < 0 || s->logit_rows[i] >= s->tokens) return TLT_BAD_ROW;
    return TLT_OK;
}

int tlt_forward(const TltModel *m, const TltStep *s, int threads, TltAllReduce all_reduce) {
    int bad = check(m, s);
    if (bad) return bad;
    Run r = {.m = m, .s = s, .all_reduce = all_reduce, .kind = m->is_bf16 ? KIND_BF16 : KIND_F32};
    r.hp = pad64(m->hidden);
    r.dp = (m->head_dim + TILE - 1) / TILE * TILE;
    r.qkv_n = (long)(m->heads + 2 * m->kv_heads) * m->head_dim;
    r.qkv_stride = pad64(r.qkv_n);
    r.q_stride = m->heads * r.dp;
    r.att_n = (long)m->heads * m->head_dim;
    r.att_stride = pad64(r.att_n);
    r.mid_stride = pad64(m->inter);
    r.threads = threads;
    tlt_team_open(threads);
    run_chunks(&r);
    tlt_team_close();
    return r.failed ? TLT_REDUCE_FAILED : TLT_OK;
}

int tlt_abi_version(void) { return TLT_ABI; }
const char *tlt_isa(void) { return TLT_DPBF16 ? TLT_ISA "+bf16" : TLT_ISA; }
int tlt_panel_width(void) { return NR; }
