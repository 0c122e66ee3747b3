/* The EAGLE drafter: one layer over pairs (token at s, hidden state of s - 1), and whole drafts in one call.
 *
 *   pair -> fc -> x (residual stream) -> layer without input norm -> rounded: hidden state -> policy's LM head
 *
 * A draft feeds the pairs that are missing, then goes on alone: the best of the keyed, perturbed scores is the drafted
 * token, and (it, the output hidden state) the next pair. All sequences that still draft take each step together; the
 * stages are the policy's (decoder.h), so a sequence's draft does not depend on the others.
 */
#include <math.h>

#include "decoder.h"
#include "eagle.h"
#include "gemm.h"
#include "pool.h"
#include "topk.h"

typedef struct {
    Run r; /* first: units get a Run and those below know that it is one of these */
    const TltEagle *e;
    const void *states;       /* [.][H] hidden states, compute type */
    const int32_t *state_of;  /* of each row; NULL: its own number */
} EagleRun;

/* pair = [E(token) ; hidden state], as activations. Rows of `pair` have 64 elements to spare: stores may run over. */
static long pair_stride(const TltModel *m) { return pad64(2L * m->hidden) + 64; }

static void pair_unit(void *arg, long row) {
    EagleRun *g = arg;
    Run *r = &g->r;
    const TltModel *m = r->m;
    const long at = row * pair_stride(m), n = m->hidden, from = r->first + row;
    float *tmp = m->resid + row * r->hp; /* fc overwrites it; the padding stays 0 */
    load_row(m, m->embed, r->s->token_ids[from], n, tmp);
    for (long i = 0; i < n; i += VW) act_store(r->kind, g->e->pair, at + i, vload(tmp + i));
    load_row(m, g->states, g->state_of ? g->state_of[from] : from, n, tmp);
    for (long i = 0; i < n; i += VW) act_store(r->kind, g->e->pair, at + n + i, vload(tmp + i));
}

static void round_unit(void *arg, long row) { tlt_norm_row(arg, row, NULL); }

/* The chunk's pairs through fc: the residual stream, and x. */
static void join_pairs(EagleRun *g) {
    Run *r = &g->r;
    const TltModel *m = r->m;
    tlt_parallel(r->rows, pair_unit, g);
    tlt_linear(r, g->e->pair, pair_stride(m), 2L * m->hidden, g->e->fc, m->hidden, EPI_STORE, NULL, m->resid, r->hp);
    tlt_parallel(r->rows, round_unit, r);
}

/* One chunk, already planned. */
static void run_chunk(EagleRun *g) {
    Run *r = &g->r;
    join_pairs(g);
    tlt_run_layer(r, 0);
    if (!r->failed) tlt_run_head(r);
}

/* All rows of the caller's step. */
static void feed(EagleRun *g) {
    Run *r = &g->r;
    for (r->first = 0; r->first < r->s->tokens && !r->failed; r->first += r->m->max_rows) {
        const long left = r->s->tokens - r->first;
        r->rows = left < r->m->max_rows ? left : r->m->max_rows;
        tlt_plan_chunk(r);
        run_chunk(g);
    }
}

static int check_eagle(const TltModel *m, const TltEagleStep *s) {
    if (s->step.parents) return TLT_BAD_PARENT;
    int bad = tlt_check_step(m, &s->step);
    for (long q = 0; q < s->step.seqs && !bad; q++) {
        if (s->first_visible[q] < 1) return TLT_BAD_VISIBLE;
        for (long i = s->step.query_start[q]; i < s->step.query_start[q + 1]; i++)
            if (s->step.positions[i] < s->first_visible[q]) return TLT_BAD_VISIBLE;
    }
    return bad;
}

int tlt_eagle_forward(const TltEagle *e, const TltEagleStep *s, int threads, TltAllReduce all_reduce) {
    int bad = check_eagle(&e->model, s);
    if (bad) return bad;
    EagleRun g = {.e = e, .states = s->states};
    tlt_run_setup(&g.r, &e->model, &s->step, threads, all_reduce);
    g.r.first_visible = s->first_visible;
    tlt_team_open(threads);
    feed(&g);
    tlt_team_close();
    return g.r.failed ? TLT_REDUCE_FAILED : TLT_OK;
}

/* Position of a sequence's last pair. */
static long last_position(const TltStep *s, long seq) { return s->positions[s->query_start[seq + 1] - 1]; }

static int check_draft(const TltModel *m, const TltStep *s, const TltDraft *d) {
    if (d->topk < 1 || d->topk > TOPK_MOST || d->topk > m->vocab || s->logits_rows != s->seqs) return TLT_BAD_SHAPE;
    for (long q = 0; q < s->seqs; q++) {
        if (s->query_start[q + 1] == s->query_start[q]) return TLT_BAD_SHAPE;
        if (s->logit_rows[q] != s->query_start[q + 1] - 1) return TLT_BAD_ROW;
        if (d->max_len[q] < 0 || d->max_len[q] > d->depth) return TLT_BAD_SHAPE;
        const long first = last_position(s, q), last = first + d->max_len[q] - 1; /* positions that will be fed */
        if (last >= m->rope_len) return TLT_BAD_POSITION;
        if (last >= (long)s->max_blocks * s->block_size) return TLT_BAD_BLOCK;
        for (long p = first + 1; p <= last; p++) {
            int32_t id = s->block_tables[q * s->max_blocks + p / s->block_size];
            if (id < 0 || id >= s->num_blocks) return TLT_BAD_BLOCK;
        }
    }
    return TLT_OK;
}

/* The sequences that still draft, and their next rows. Arrays of [S]; `at` is the row of logits and states. */
typedef struct {
    long count;
    int32_t *seq, *at, *token, *position, *slot, *identity;
} Active;

static Active active_in(int32_t *work, long seqs) {
    Active a = {0, work, work + seqs, work + 2 * seqs, work + 3 * seqs, work + 4 * seqs, work + 5 * seqs};
    return a;
}

/* Records token `l` of active row i, unless its cumulative_acceptance is too low; says whether the chain may go on. */
static int record(const TltDraft *d, const TltModel *m, long seq, long l, const TopK *best, const float *logits) {
    const float *rates = d->rates + (l < TLT_DEPTHS ? l : TLT_DEPTHS - 1) * TLT_BUCKETS;
    const long at = seq * d->depth + l;
    const float gap = m->vocab > 1 ? best->score[0] - best->score[1] : INFINITY, steps = gap / TLT_BUCKET_WIDTH;
    const int bucket = steps < TLT_BUCKETS - 1 ? (int)steps : TLT_BUCKETS - 1;
    const float cumulative_acceptance = (l ? d->cumulative_acceptance[at - 1] : 1.0f) * rates[bucket];
    if (cumulative_acceptance < d->min_cumulative_acceptance) return 0;
    d->cumulative_acceptance[at] = cumulative_acceptance;
    d->lengths[seq] = (int32_t)l + 1;
    for (int k = 0; k < d->topk; k++) {
        d->tokens[at * d->topk + k] = best->token[k];
        d->gaps[at * d->topk + k] = k ? best->score[0] - best->score[k] : gap;
    }
    if (d->logits) memcpy(d->logits + at * m->vocab, logits, (size_t)m->vocab * sizeof(float));
    if (l + 1 == d->max_len[seq]) return 0;
    /* Whatever the next gap: if even the best rate is too low, its pair need not be computed. */
    const float *next = d->rates + (l + 1 < TLT_DEPTHS ? l + 1 : TLT_DEPTHS - 1) * TLT_BUCKETS;
    float most = next[0];
    for (int i = 1; i < TLT_BUCKETS; i++) most = next[i] > most ? next[i] : most;
    return cumulative_acceptance * most >= d->min_cumulative_acceptance;
}

/* Draws candidates `l` of the active sequences, records them, and makes the rows of those that go on. */
static void draw(const TltDraft *d, const TltModel *m, const TltStep *s, Active *a, long l) {
    const int n = d->topk > 1 ? d->topk : (m->vocab > 1 ? 2 : 1);
    TopKRows t = {d->last_logits, m->vocab, m->vocab, n, a->at, a->seq, d->temperature, d->keys, d->output_positions, l,
                  d->best};
    const int64_t pieces = topk_pieces(m->vocab);
    long kept = 0;
    topk_rows(&t, a->count);
    for (long i = 0; i < a->count; i++) {
        const TopK *best = &t.out[i * pieces];
        const long seq = a->seq[i], row = a->at[i], position = last_position(s, seq) + 1 + l;
        if (!record(d, m, seq, l, best, d->last_logits + row * m->vocab)) continue;
        const int32_t block = s->block_tables[seq * s->max_blocks + position / s->block_size];
        a->seq[kept] = (int32_t)seq;
        a->at[kept] = (int32_t)row;
        a->token[kept] = best->token[0];
        a->position[kept] = (int32_t)position;
        a->slot[kept++] = (int32_t)(block * s->block_size + position % s->block_size);
    }
    a->count = kept;
}

/* One row for each active sequence. Row i's logits and state replace row i of the last ones: states are read before, a
 * chunk's rows being taken from the same or later rows. */
static void step_rows(EagleRun *g, Active *a, const TltStep *s) {
    Run *r = &g->r;
    TltStep rows = *s;
    rows.tokens = rows.logits_rows = (int32_t)a->count;
    rows.token_ids = a->token;
    rows.positions = a->position;
    rows.slots = a->slot;
    rows.logit_rows = a->identity;
    r->s = &rows;
    g->states = s->hidden;
    g->state_of = a->at;
    for (r->first = 0; r->first < a->count; r->first += r->m->max_rows) {
        r->rows = a->count - r->first < r->m->max_rows ? a->count - r->first : r->m->max_rows;
        r->units = r->rows;
        for (long i = 0; i < r->rows; i++) {
            int32_t *u = r->m->units + 4 * i;
            u[0] = (int32_t)i, u[1] = 1, u[2] = a->seq[r->first + i], u[3] = 0;
        }
        run_chunk(g);
    }
    for (long i = 0; i < a->count; i++) a->at[i] = (int32_t)i;
}

/* Moves the last rows of sequences [from, to), which end in this chunk, to its front, and plans them. */
static void keep_last_rows(Run *r, long from, long to) {
    const TltModel *m = r->m;
    const long width = r->hp * act_bytes(r->kind);
    for (long q = from; q < to; q++) {
        const long row = r->s->query_start[q + 1] - 1 - r->first, i = q - from;
        int32_t *u = m->units + 4 * i;
        u[0] = (int32_t)i, u[1] = 1, u[2] = (int32_t)q, u[3] = 0;
        if (row == i) continue;
        memcpy(m->resid + i * r->hp, m->resid + row * r->hp, (size_t)r->hp * sizeof(float));
        memcpy((char *)m->x + i * width, (char *)m->x + row * width, (size_t)width);
    }
}

/* The caller's pairs, `s`. One layer: of all pairs but a sequence's last one only keys and values matter. */
static void feed_for_draft(EagleRun *g, const Active *a, const TltStep *s) {
    Run *r = &g->r;
    TltStep last = *s; /* one row for each sequence */
    last.positions = a->position;
    last.logit_rows = a->identity;
    for (long first = 0, from = 0, to = 0; first < s->tokens; first += r->m->max_rows, from = to) {
        r->s = s;
        r->first = first;
        r->rows = s->tokens - first < r->m->max_rows ? s->tokens - first : r->m->max_rows;
        join_pairs(g);
        tlt_run_keys(r, 0);
        while (to < s->seqs && s->query_start[to + 1] <= first + r->rows) to++;
        if (to == from) continue;
        keep_last_rows(r, from, to);
        r->s = &last;
        r->first = from;
        r->rows = r->units = to - from;
        tlt_run_queries(r, 0);
        tlt_run_head(r);
    }
}

int tlt_eagle_draft_at(const TltEagle *e, const TltEagleStep *s, const int32_t *state_of, const TltDraft *d,
                       int threads) {
    const TltModel *m = &e->model;
    TltStep step = s->step;
    int bad = check_eagle(m, s);
    if (!bad) bad = check_draft(m, &step, d);
    if (bad) return bad;
    step.logits = d->last_logits;
    step.logits_stride = m->vocab;
    step.hidden = d->last_hidden;
    EagleRun g = {.e = e, .states = s->states, .state_of = state_of};
    tlt_run_setup(&g.r, m, &step, threads, 0);
    g.r.first_visible = s->first_visible;
    const size_t nodes = (size_t)step.seqs * d->depth, item = sizeof(float);
    memset(d->cumulative_acceptance, 0, nodes * item);
    memset(d->tokens, 0, nodes * d->topk * item);
    memset(d->gaps, 0, nodes * d->topk * item);
    Active a = active_in(d->work, step.seqs);
    for (long q = 0; q < step.seqs; q++) {
        d->lengths[q] = 0;
        a.identity[q] = (int32_t)q;
        a.position[q] = (int32_t)last_position(&step, q);
        if (d->max_len[q] < 1) continue;
        a.seq[a.count] = a.at[a.count] = (int32_t)q;
        a.count++;
    }
    tlt_team_open(threads);
    feed_for_draft(&g, &a, &step);
    for (long l = 0; a.count; l++) {
        draw(d, m, &step, &a, l);
        if (a.count) step_rows(&g, &a, &step);
    }
    tlt_team_close();
    return TLT_OK;
}

int tlt_eagle_draft(const TltEagle *e, const TltEagleStep *s, const TltDraft *d, int threads) {
    return tlt_eagle_draft_at(e, s, NULL, d, threads);
}
