/* The trained drafter: one layer over pairs (token at s, state of s - 1), and drafts from the engine's rows.
 *
 *   eagle    pair -> fc -> x (residual stream) -> layer without input norm -> output -> policy's LM head
 *   eagle3   state -> fc -> residual stream; norms of embedding and of it, side by side -> layer -> output;
 *            its norm -> own LM head. A drafted token's pair has the output before in place of fc's.
 *
 * Of a pair that nothing is drafted from only queries, keys and values are computed. A draft caches the pairs that are
 * missing, then steps from each row's last one: the best of the keyed, perturbed scores is the drafted token, and (it,
 * the output hidden state) the next pair. All rows that still draft take each step together; the stages are the
 * policy's (decoder.h), so a row's draft does not depend on the others.
 */
#include "eagle.h"

#include <math.h>

#include "decoder.h"
#include "noise.h"
#include "sample.h"

typedef struct {
    Run r; /* first: units get a Run, those below cast it to this */
    const TltEagle *e;
    const num *states;       /* [.][W] of the policy, or [.][H] outputs */
    int is_output;
    const int32_t *state_of; /* of each row of the step */
    num *out;                /* [.][H] outputs of the step */
} EagleRun;

/* Rows of `pair` have 64 elements to spare: stores may run over. */
static long pair_stride(const TltModel *m) { return pad64(3L * m->hidden) + 64; }

static void copy_row(const TltModel *m, const num *from, num *to) { memcpy(to, from, (size_t)m->hidden * sizeof *to); }

/* eagle: pair = [E(token) ; hidden state]. */
static void pair_unit(void *arg, long row) {
    EagleRun *g = arg;
    const TltModel *m = g->r.m;
    const long n = m->hidden, from = g->r.first + row;
    num *pair = g->e->pair + row * pair_stride(m);
    copy_row(m, m->embed + g->r.s->token_ids[from] * n, pair);
    copy_row(m, g->states + g->state_of[from] * n, pair + n);
}

/* eagle3: the three layers' outputs of a state, for fc; or an output, which is the residual stream. */
static void features_unit(void *arg, long row) {
    EagleRun *g = arg;
    const TltModel *m = g->r.m;
    const long n = m->hidden, state = g->state_of[g->r.first + row];
    if (g->is_output) {
        widen(g->states + state * n, n, m->resid + row * g->r.hp);
        return;
    }
    const num *from = g->states + state * g->e->state_width;
    memcpy(g->e->pair + row * pair_stride(m), from, (size_t)(3 * n) * sizeof *from);
}

/* eagle3: pair = [norm(E(token)) ; norm(residual stream)]. */
static void norms_unit(void *arg, long row) {
    EagleRun *g = arg;
    const Run *r = &g->r;
    const TltModel *m = r->m;
    const long at = row * pair_stride(m), n = m->hidden;
    float *resid = m->resid + row * r->hp, *tmp = m->part + row * r->hp;
    widen(m->embed + r->s->token_ids[r->first + row] * n, n, tmp);
    tlt_rms_norm(r, tmp, m->layer[0].input_norm, g->e->pair + at, NULL);
    tlt_rms_norm(r, resid, g->e->hidden_norm, g->e->pair + at + n, g->e->norm_before_residual ? resid : NULL);
    memset(g->e->pair + at + 2 * n, 0, K_STEP * sizeof(num)); /* where features were */
}

/* A row's output, before the norm of the head, if it has one. */
static void output_unit(void *arg, long row) {
    EagleRun *g = arg;
    const TltModel *m = g->r.m;
    narrow(m->resid + row * g->r.hp, m->hidden, g->out + (g->r.first + row) * m->hidden);
}

static void stream_unit(void *arg, long row) { tlt_norm_row(arg, row, NULL); }

/* The pairs of the step's rows [first, first + rows) through fc: the residual stream, and x. */
static void join_pairs(EagleRun *g, long first) {
    Run *r = &g->r;
    const TltModel *m = r->m;
    r->first = first;
    r->rows = r->s->tokens - first < m->max_rows ? r->s->tokens - first : m->max_rows;
    if (!g->e->hidden_norm) {
        tlt_parallel(r->rows, pair_unit, g);
        tlt_linear(r, g->e->pair, pair_stride(m), 2L * m->hidden, g->e->fc, m->hidden, EPI_STORE, NULL, m->resid, r->hp);
        tlt_parallel(r->rows, stream_unit, r);
        return;
    }
    tlt_parallel(r->rows, features_unit, g);
    if (!g->is_output)
        tlt_linear(r, g->e->pair, pair_stride(m), 3L * m->hidden, g->e->fc, m->hidden, EPI_STORE, NULL, m->resid, r->hp);
    tlt_parallel(r->rows, norms_unit, g);
}

/* Queries, keys and values of kind eagle3 are projected from the pair. */
static void set_up(EagleRun *g, const TltStep *s, int threads) {
    const TltModel *m = &g->e->model;
    tlt_run_setup(&g->r, m, s, threads, 0);
    if (!g->e->hidden_norm) return;
    g->r.in = g->e->pair;
    g->r.in_stride = pair_stride(m);
    g->r.in_width = 2L * m->hidden;
}

static void cache_pairs(EagleRun *g) {
    for (long first = 0; first < g->r.s->tokens; first += g->r.m->max_rows) {
        join_pairs(g, first);
        tlt_run_keys(&g->r, 0);
    }
}

static int check_pairs(const TltEagle *e, const TltPairs *p, const TltStep *s) {
    const long slots = (long)p->num_blocks * p->block_size;
    const int bad = tlt_check_rows(&e->model, s, e->vocab);
    for (long i = 0; i < p->count && !bad; i++) {
        if (p->positions[i] < 1) return TLT_BAD_POSITION; /* has no state before it */
        if (p->state_slots[i] < 0 || p->state_slots[i] >= slots) return TLT_BAD_SLOT;
    }
    return bad;
}

int tlt_eagle_feed(const TltEagle *e, const TltPairs *p, int threads) {
    const TltStep s = {.tokens = p->count, .num_blocks = p->num_blocks, .block_size = p->block_size,
                       .token_ids = p->tokens, .positions = p->positions, .slots = p->slots, .kv = p->kv};
    const int bad = check_pairs(e, p, &s);
    if (bad) return bad;
    EagleRun g = {.e = e, .states = p->pages, .state_of = p->state_slots};
    set_up(&g, &s, threads);
    tlt_team_open(threads);
    cache_pairs(&g);
    tlt_team_close();
    return TLT_OK;
}

/* Scratch of a draft. */
typedef struct {
    int32_t *token, *position, *slot, *state; /* [B * W] the missing pairs but each row's last */
    /* [B] the rows that still draft: number, row of logits and hidden states, and their next pair */
    int32_t *row, *at, *next_token, *next_position, *next_slot;
    int32_t *identity, *visible; /* [B] 0, 1, ...; first visible position by row */
    int32_t *tokens, *feature;   /* [B][D] */
    float *acceptance;           /* [B][D] */
    float *logits;               /* [B][Vd] over the drafter's vocabulary */
    num *hidden;                 /* [B][H] */
    Best *best;
    uint64_t *keys; /* [B] of the tokens that are drawn next, */
    float *heat;    /* and their temperatures */
    long pairs, active;
} Scratch;

static void *take(char **at, size_t bytes) {
    void *taken = *at;
    *at += (bytes + 63) / 64 * 64;
    return taken;
}

/* Lays the scratch out from `base` on; returns its end. */
static char *lay_out(const TltEagle *e, const TltDraft *d, char *base, Scratch *c) {
    const TltModel *m = &e->model;
    const size_t b = (size_t)d->rows, pairs = b * (size_t)d->catch_up, drafted = b * (size_t)d->longest;
    int32_t **by_pair[] = {&c->token, &c->position, &c->slot, &c->state};
    int32_t **by_row[] = {&c->row, &c->at, &c->next_token, &c->next_position, &c->next_slot, &c->identity, &c->visible};
    for (size_t i = 0; i < sizeof by_pair / sizeof *by_pair; i++) *by_pair[i] = take(&base, 4 * pairs);
    for (size_t i = 0; i < sizeof by_row / sizeof *by_row; i++) *by_row[i] = take(&base, 4 * b);
    c->tokens = take(&base, 4 * drafted);
    c->feature = take(&base, 4 * drafted);
    c->acceptance = take(&base, 4 * drafted);
    c->logits = take(&base, 4 * b * (size_t)m->vocab);
    c->hidden = take(&base, sizeof *c->hidden * b * (size_t)m->hidden);
    c->best = take(&base, sizeof *c->best * b * (size_t)tlt_segments(m->vocab));
    c->keys = take(&base, sizeof *c->keys * b);
    c->heat = take(&base, sizeof *c->heat * b);
    return base;
}

int64_t tlt_draft_scratch_bytes(const TltEagle *e, const TltDraft *d) {
    Scratch c;
    static char origin[64];
    return lay_out(e, d, origin, &c) - origin + 64;
}

/* The slot that a row's block table gives a position. */
static int32_t slot_of(const TltDraft *d, long row, long position) {
    const int32_t block = d->block_tables[row * d->max_blocks + position / d->block_size];
    return (int32_t)(block * (long)d->block_size + position % d->block_size);
}

/* Whether the positions up to `last`, and those that may be drafted behind it, are in the tables. */
static int check_row(const TltModel *m, const TltDraft *d, long row, long last) {
    const long end = last + d->wanted[row] - 1; /* of the pairs that will be fed */
    if (last < 1 || d->wanted[row] > d->longest) return TLT_BAD_SHAPE;
    if (end >= m->rope_len) return TLT_BAD_POSITION;
    if (end / d->block_size >= d->max_blocks) return TLT_BAD_BLOCK;
    for (long b = 0; b <= end / d->block_size; b++) {
        const int32_t block = d->block_tables[row * d->max_blocks + b];
        if (block < 0 || block >= d->num_blocks) return TLT_BAD_BLOCK;
    }
    return TLT_OK;
}

/* The pairs between the last cached one and the row's last token, or the last W of them. */
static int lay_row(const TltEagle *e, TltDraft *d, Scratch *c, long row) {
    const TltModel *m = &e->model;
    const long slot = d->slot[row], last = d->positions[row], drawn = d->output_len[row];
    if (slot < 0 || slot >= d->slots) return TLT_BAD_SHAPE;
    const long next = d->synced[slot] + 1L, oldest = last - d->catch_up + 1, begin = next > oldest ? next : oldest;
    if (begin > last) return TLT_OK;
    if (begin < 1 || drawn > d->width || last - begin >= drawn) return TLT_BAD_SHAPE;
    const int bad = check_row(m, d, row, last);
    if (bad) return bad;
    const int32_t *tokens = d->outputs + slot * d->width + drawn - 1 - last; /* of position p at [p] */
    for (long p = begin; p <= last; p++) {
        if (tokens[p] < 0 || tokens[p] >= e->vocab) return TLT_BAD_TOKEN;
        if (p == last) break;
        const long i = c->pairs++;
        c->token[i] = tokens[p];
        c->position[i] = (int32_t)p;
        c->slot[i] = slot_of(d, row, p);
        c->state[i] = slot_of(d, row, p - 1);
    }
    if (begin > next) d->first[slot] = (int32_t)begin; /* too late for those before */
    c->visible[row] = d->first[slot];
    const long i = c->active++;
    c->row[i] = (int32_t)row;
    c->at[i] = slot_of(d, row, last - 1);
    c->next_token[i] = tokens[last];
    c->next_position[i] = (int32_t)last;
    c->next_slot[i] = slot_of(d, row, last);
    return TLT_OK;
}

static int bucket_of(float gap) {
    const float steps = gap / TLT_BUCKET_WIDTH;
    return steps < TLT_BUCKETS - 1 ? (int)steps : TLT_BUCKETS - 1;
}

/* Whether a token is kept whose best candidates are `best`, at draft position l of a row, and drafted on from. */
static int record(const TltDraft *d, const Scratch *c, long row, long l, const Best *best, int has_second) {
    const long at = row * d->longest + l, position = l < TLT_POSITIONS ? l : TLT_POSITIONS - 1;
    const long feature = position * TLT_BUCKETS + bucket_of(has_second ? best->score[0] - best->score[1] : INFINITY);
    const float acceptance = (l ? c->acceptance[at - 1] : 1.0f) * d->rates[feature];
    if (acceptance < d->min_acceptance) return 0;
    c->acceptance[at] = acceptance;
    c->tokens[at] = best->token[0];
    c->feature[at] = (int32_t)feature;
    d->counts[row] = (int32_t)l + 1;
    if (l + 1 == d->wanted[row]) return 0;
    /* Whatever the next gap: if even the best rate is too low, its pair need not be computed. */
    const float *next = d->rates + (l + 1 < TLT_POSITIONS ? l + 1 : TLT_POSITIONS - 1) * TLT_BUCKETS;
    float most = next[0];
    for (int i = 1; i < TLT_BUCKETS; i++) most = next[i] > most ? next[i] : most;
    return acceptance * most >= d->min_acceptance;
}

/* The candidates at draft position l of the active rows; those that go on stay active. */
static void draw(const TltDraft *d, const TltEagle *e, Scratch *c, long l) {
    const int32_t vocab = e->model.vocab;
    const int n = vocab > 1 ? 2 : 1;
    const long before = c->active;
    for (long i = 0; i < before; i++) {
        const long row = c->row[i];
        c->keys[i] = row_key(d->keys[row], d->output_len[row] + l);
        c->heat[i] = d->temperature[row];
    }
    const Scoring drawn = {c->logits, before, vocab, vocab, n, c->heat, c->keys, e->ids, c->best};
    tlt_score(&drawn);
    c->active = 0;
    for (long i = 0; i < before; i++) {
        const Best *best = &c->best[i * tlt_segments(vocab)];
        const long row = c->row[i], position = c->next_position[i] + 1L;
        if (!record(d, c, row, l, best, n > 1)) continue;
        const long kept = c->active++;
        c->row[kept] = (int32_t)row;
        c->at[kept] = (int32_t)i;
        c->next_token[kept] = best->token[0];
        c->next_position[kept] = (int32_t)position;
        c->next_slot[kept] = slot_of(d, row, position);
    }
}

/* Logits and outputs of the active rows' next pairs. Row i's replace row i of the last ones: hidden states are read
 * before, a chunk's rows being taken from the same or later rows. */
static void step(EagleRun *g, const TltDraft *d, const Scratch *c) {
    Run *r = &g->r;
    const TltStep s = {.tokens = (int32_t)c->active, .logits_rows = (int32_t)c->active, .max_blocks = d->max_blocks,
                       .num_blocks = d->num_blocks, .block_size = d->block_size, .token_ids = c->next_token,
                       .positions = c->next_position, .slots = c->next_slot, .block_tables = d->block_tables,
                       .logit_rows = c->identity, .kv = d->kv, .logits = c->logits};
    r->s = &s;
    r->wanted = 0;
    g->out = c->hidden;
    g->state_of = c->at;
    for (long first = 0; first < c->active; first += r->m->max_rows) {
        join_pairs(g, first);
        r->units = r->rows;
        for (long i = 0; i < r->rows; i++) {
            int32_t *u = r->m->units + 3 * i;
            u[0] = (int32_t)i, u[1] = 1, u[2] = c->row[first + i];
        }
        tlt_run_layer(r, 0);
        tlt_parallel(r->rows, output_unit, g);
        tlt_run_head(r);
    }
    g->states = c->hidden;
    g->is_output = 1;
}

/* The drafts row after row, without gaps. */
static void flatten(TltDraft *d, const Scratch *c) {
    for (long row = 0, to = 0; row < d->rows; to += d->counts[row++]) {
        const size_t bytes = 4 * (size_t)d->counts[row];
        memcpy(d->tokens + to, c->tokens + row * d->longest, bytes);
        memcpy(d->feature + to, c->feature + row * d->longest, bytes);
        memcpy(d->cumulative_acceptance + to, c->acceptance + row * d->longest, bytes);
    }
}

int tlt_draft_rows(const TltEagle *e, TltDraft *d, int threads) {
    Scratch c = {0};
    if (d->rows > d->slots || d->block_size < TILE || d->block_size % TILE) return TLT_BAD_SHAPE;
    lay_out(e, d, (char *)(((uintptr_t)d->scratch + 63) / 64 * 64), &c);
    int bad = TLT_OK;
    for (long row = 0; row < d->rows && !bad; row++) {
        d->counts[row] = 0;
        c.identity[row] = (int32_t)row;
        if (d->wanted[row] > 0) bad = lay_row(e, d, &c, row);
    }
    if (bad) return bad;
    const TltStep pairs = {.tokens = (int32_t)c.pairs, .num_blocks = d->num_blocks, .block_size = d->block_size,
                           .token_ids = c.token, .positions = c.position, .slots = c.slot, .kv = d->kv};
    EagleRun g = {.e = e, .states = d->pages, .state_of = c.state};
    set_up(&g, &pairs, threads);
    g.r.first_visible = c.visible;
    tlt_team_open(threads);
    cache_pairs(&g);
    for (long i = 0; i < c.active; i++) d->synced[d->slot[c.row[i]]] = d->positions[c.row[i]];
    for (long l = 0; c.active; l++) {
        step(&g, d, &c);
        draw(d, e, &c, l);
    }
    tlt_team_close();
    flatten(d, &c);
    return TLT_OK;
}
