/* One forward pass: embedding, layers, final norm and LM head, by a team of threads.
 *
 * Rows are processed in chunks of at most max_rows (a later chunk sees the keys of an earlier one through the
 * cache). Within a chunk the calling thread runs stage after stage, each a set of units shared by the team (pool.c):
 *
 *   embed+norm | qkv | rope, cache write | attention | o (+residual) | norm | gate, up, silu | down (+residual)
 *              ^-------------------------------- once a layer ---------------------------------------------^
 *
 * Under tensor parallelism o and down go to `part`, the caller sums it over the ranks, then it is added.
 * Residual stream, norms and sums are fp32; weights, cache and inputs of products are fp32 or bf16 (numbers.h).
 */
#include "decoder.h"

#include <math.h>

#include "attention.h"

/* x * rsqrt(mean(x^2) + eps) * weight, over `n` values stored with zero padding up to `padded`; see tlt_rms_norm. */
INLINE void rms_norm(const float *x, const float *weight, long n, long padded, float eps, num *out, float *wide) {
    vf sum = vzero();
    for (long i = 0; i < padded; i += VW) sum = vfma(vload(x + i), vload(x + i), sum);
    vf scale = vset(1.0f / sqrtf(vsum(sum) / (float)n + eps));
    for (long i = 0; i < padded; i += VW) {
        const vf y = vload(x + i) * scale * vload(weight + i);
        if (out) nstore(out + i, y);
        if (wide) vstore(wide + i, y);
    }
}

void tlt_rms_norm(const Run *r, const float *x, const float *weight, num *out, float *wide) {
    rms_norm(x, weight, r->m->hidden, r->hp, r->m->eps, out, wide);
}

/* Row `to` of x from row `row` of the residual stream. */
static void norm_to(const Run *r, long row, const float *weight, long to) {
    const float *x = r->m->resid + row * r->hp;
    num *out = r->m->x + to * r->hp;
    if (weight) tlt_rms_norm(r, x, weight, out, NULL);
    else narrow(x, r->hp, out);
}

void tlt_norm_row(Run *r, long row, const float *weight) { norm_to(r, row, weight, row); }

static void embed_unit(void *arg, long row) {
    Run *r = arg;
    const TltModel *m = r->m;
    float *out = m->resid + row * r->hp;
    memset(out, 0, (size_t)r->hp * sizeof(float));
    widen(m->embed + (long)r->s->token_ids[r->first + row] * m->hidden, m->hidden, out);
    tlt_norm_row(r, row, m->layer[0].input_norm);
}

/* One head: optional norm, rotation of the two halves; `out` is zero-padded to Dp. */
static void rotate(const Run *r, const float *in, const float *weight, const float *rope, float *out) {
    const long d = r->m->head_dim, half = d / 2;
    const size_t used = (size_t)d * sizeof(float), padding = (size_t)(r->dp - d) * sizeof(float);
    float x[TLT_MAX_HEAD_DIM], w[TLT_MAX_HEAD_DIM];
    memcpy(x, in, used);
    memset(x + d, 0, padding);
    if (weight) {
        memcpy(w, weight, used);
        memset(w + d, 0, padding);
        rms_norm(x, w, d, r->dp, r->m->eps, NULL, x);
    }
    for (long i = 0; i < half; i++) {
        out[i] = x[i] * rope[i] - x[half + i] * rope[half + i];
        out[half + i] = x[half + i] * rope[i] + x[i] * rope[half + i];
    }
    memset(out + d, 0, padding);
}

static num *kv_plane(const Run *r, long layer, long which) {
    const TltStep *s = r->s;
    long tiles = (long)s->num_blocks * r->m->kv_heads * (s->block_size / TILE);
    return s->kv + (layer * 2 + which) * tiles * tile_size(r->dp);
}

/* Unit = one row: rotates its queries and keys, writes keys and values into the cache. */
static void rope_unit(void *arg, long row) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const TltLayer *l = &m->layer[r->layer];
    const long d = m->head_dim, size = tile_size(r->dp);
    num *keys = kv_plane(r, r->layer, 0), *values = kv_plane(r, r->layer, 1);
    const float *in = m->qkv_out + row * r->qkv_stride, *rope = m->rope + (long)s->positions[r->first + row] * d;
    const long slot = s->slots[r->first + row], block = slot / s->block_size, offset = slot % s->block_size;
    float tmp[TLT_MAX_HEAD_DIM];
    for (long h = 0; h < m->heads; h++) {
        rotate(r, in + h * d, l->q_norm, rope, tmp);
        narrow(tmp, r->dp, m->q + row * r->q_stride + h * r->dp);
    }
    for (long h = 0; h < m->kv_heads; h++) {
        long tile = tile_index(m->kv_heads, s->block_size, h, block, offset / TILE);
        rotate(r, in + (m->heads + h) * d, l->k_norm, rope, tmp);
        tlt_store_key(keys + tile * size, offset % TILE, r->dp, tmp);
        memcpy(tmp, in + (m->heads + m->kv_heads + h) * d, (size_t)d * sizeof(float));
        memset(tmp + d, 0, (size_t)(r->dp - d) * sizeof(float));
        tlt_store_value(values + tile * size, offset % TILE, r->dp, tmp);
    }
}

/* Unit = some rows of one sequence x one kv head. */
static void attention_unit(void *arg, long unit) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const int32_t *u = m->units + unit / m->kv_heads * 3;
    const long row = r->first + u[0];
    Attention a = {m->heads, m->kv_heads, m->head_dim, r->dp, s->num_blocks, s->block_size,
                   kv_plane(r, r->layer, 0), kv_plane(r, r->layer, 1), m->q, m->att, r->att_stride};
    Span span = {s->positions + row, s->block_tables + (long)u[2] * s->max_blocks,
                 r->first_visible ? r->first_visible[u[2]] : 0};
    tlt_attend(&a, u[0], u[1], unit % m->kv_heads, &span);
}

void tlt_linear(Run *r, const num *a, long a_stride, long k, const num *w, long n, int epilogue, const float *bias,
                void *out, long out_stride) {
    Gemm g = {epilogue, r->rows, n, k, a, a_stride, w, bias, out, out_stride, 1};
    tlt_gemm(&g, r->threads);
}

/* residual += part (tensor parallel only), then the coming norm. */
static void norm_unit(void *arg, long row) {
    Run *r = arg;
    float *x = r->m->resid + row * r->hp;
    if (r->m->tp > 1)
        for (long i = 0; i < r->hp; i += VW) vstore(x + i, vload(x + i) + vload(r->m->part + row * r->hp + i));
    if (r->norm) tlt_norm_row(r, row, r->norm);
}

/* Ends a half layer: the sum over the ranks, the residual, the norm with `weight` (NULL: none). */
static void finish_half(Run *r, const float *weight) {
    if (r->m->tp > 1) {
        const int64_t before = r->m->reduced;
        r->all_reduce(r->m->part, r->rows * r->hp);
        r->failed = r->m->reduced == before;
    }
    r->norm = weight;
    if (weight || r->m->tp > 1) tlt_parallel(r->rows, norm_unit, r);
}

void tlt_run_mlp(Run *r, long inter, int epilogue, float *out) {
    const TltModel *m = r->m;
    const TltLayer *l = &m->layer[r->layer];
    const long panels = (inter + NR - 1) / NR, stride = pad64(inter);
    tlt_linear(r, m->x, r->hp, m->hidden, l->gate_up, 2 * panels * NR, EPI_SILU, NULL, m->mid, stride);
    tlt_linear(r, m->mid, stride, inter, l->down, m->hidden, epilogue, NULL, out, r->hp);
}

/* A layer from attention on: queries are rotated, keys and values cached. */
static void attend_and_mix(Run *r) {
    const TltModel *m = r->m;
    const TltLayer *l = &m->layer[r->layer];
    const int add = m->tp > 1 ? EPI_STORE : EPI_ADD;
    float *sum = m->tp > 1 ? m->part : m->resid;
    tlt_parallel(r->units * m->kv_heads, attention_unit, r);
    tlt_linear(r, m->att, r->att_stride, r->att_n, l->o, m->hidden, add, NULL, sum, r->hp);
    finish_half(r, l->post_norm);
    if (r->failed) return;
    if (l->router) tlt_run_experts(r);
    else tlt_run_mlp(r, m->inter, add, sum);
    finish_half(r, r->layer + 1 < m->layers ? m->layer[r->layer + 1].input_norm : NULL);
}

void tlt_run_keys(Run *r, long index) {
    const TltLayer *l = &r->m->layer[index];
    r->layer = index;
    tlt_linear(r, r->in, r->in_stride, r->in_width, l->qkv, r->qkv_n, EPI_BIAS, l->qkv_bias, r->m->qkv_out,
               r->qkv_stride);
    tlt_parallel(r->rows, rope_unit, r);
}

void tlt_run_layer(Run *r, long index) {
    tlt_run_keys(r, index);
    attend_and_mix(r);
}

/* Residual stream of a row behind auxiliary layer number `r->aux`. */
static void aux_unit(void *arg, long row) {
    const Run *r = arg;
    const long n = r->m->hidden;
    narrow(r->m->resid + row * r->hp, n, r->s->hidden + (r->first + row) * state_width(r->m) + r->aux * n);
}

/* A layer's output, where it is part of the state. */
static void run_aux(Run *r, long layer) {
    for (r->aux = 0; r->aux < r->m->aux_count; r->aux++)
        if (r->m->aux[r->aux] == layer && r->s->hidden) tlt_parallel(r->rows, aux_unit, r);
}

/* A row's final hidden state, the last part of its state. */
static void hidden_unit(void *arg, long row) {
    Run *r = arg;
    const long n = r->m->hidden;
    tlt_norm_row(r, row, r->m->final_norm);
    num *end = r->s->hidden + (r->first + row + 1) * state_width(r->m);
    memcpy(end - n, r->m->x + row * r->hp, (size_t)n * sizeof(num));
}

/* Unit = one wanted row of the chunk: the final norm, compacted into x. */
static void final_norm_unit(void *arg, long i) {
    const Run *r = arg;
    norm_to(r, r->s->logit_rows[r->wanted + i] - r->first, r->m->final_norm, i);
}

void tlt_run_head(Run *r) {
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    long count = 0;
    if (s->hidden) tlt_parallel(r->rows, hidden_unit, r);
    while (r->wanted + count < s->logits_rows && s->logit_rows[r->wanted + count] < r->first + r->rows) count++;
    if (!count) return;
    tlt_parallel(count, final_norm_unit, r);
    Gemm g = {EPI_STORE, count, m->vocab, m->hidden, m->x, r->hp, m->head, NULL,
              s->logits + r->wanted * (long)m->vocab, m->vocab, 0};
    tlt_gemm(&g, r->threads);
    r->wanted += count;
}

static void run_chunks(Run *r) {
    for (long first = 0; first < r->s->tokens; first += r->m->max_rows) {
        long left = r->s->tokens - first;
        r->first = first;
        r->rows = left < r->m->max_rows ? left : r->m->max_rows;
        tlt_plan_chunk(r);
        tlt_parallel(r->rows, embed_unit, r);
        for (long l = 0; l < r->m->layers && !r->failed; l++) {
            tlt_run_layer(r, l);
            run_aux(r, l);
        }
        if (r->failed) return;
        tlt_run_head(r);
    }
}

void tlt_run_setup(Run *r, const TltModel *m, const TltStep *s, int threads, TltAllReduce all_reduce) {
    *r = (Run){.m = m, .s = s, .all_reduce = all_reduce, .threads = threads};
    r->hp = r->in_stride = pad64(m->hidden);
    r->in = m->x;
    r->in_width = m->hidden;
    r->dp = (m->head_dim + TILE - 1) / TILE * TILE;
    r->qkv_n = (long)(m->heads + 2 * m->kv_heads) * m->head_dim;
    r->qkv_stride = pad64(r->qkv_n);
    r->q_stride = m->heads * r->dp;
    r->att_n = (long)m->heads * m->head_dim;
    r->att_stride = pad64(r->att_n);
}

int tlt_forward(const TltModel *m, const TltStep *s, int threads, TltAllReduce all_reduce) {
    int bad = tlt_check_step(m, s);
    if (bad) return bad;
    Run r;
    tlt_run_setup(&r, m, s, threads, all_reduce);
    tlt_team_open(threads);
    run_chunks(&r);
    tlt_team_close();
    return r.failed ? TLT_REDUCE_FAILED : TLT_OK;
}

int tlt_panel_width(void) { return NR; }

int tlt_cell_numbers(void) { return PER; }

int tlt_row_multiple(void) { return K_STEP; }
