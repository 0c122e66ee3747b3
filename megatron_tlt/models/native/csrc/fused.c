/* One decoding step in one call, from the engine's own arrays to the emitted tokens.
 *
 *   lay rows and nodes -> tlt_forward, hidden states to their pages -> keyed token of every fed row -> follow the draft
 *   -> move accepted branches
 *
 * The same functions compute the same numbers as in single calls; this only saves what stands between them. Coupled
 * verification (Daliri et al., 2408.07978, section 3): drafted tokens decide which fed rows are real, never what is
 * drawn there. Tensor parallelism, masks and other verifiers are not for this path.
 */
#define _POSIX_C_SOURCE 200809L
#include "fused.h"

#include "decoder.h"

#include <string.h>
#include <time.h>

#include "noise.h"

/* The fed rows, in scratch: arrays of [T], `start` [D + 1]. */
typedef struct {
    int32_t *token, *position, *slot, *parent, *start, *identity, *drawn, *from, *to, *depth;
    uint8_t *branch, *emitted;
    long count;
    int all_drawn;
} Fed;

static Fed fed_in(const TltFused *f) {
    const long n = f->rows + f->nodes + 1;
    int32_t *at = f->ints;
    return (Fed){at,         at + n,     at + 2 * n, at + 3 * n, at + 4 * n,  at + 5 * n,
                 at + 6 * n, at + 7 * n, at + 8 * n, at + 9 * n, f->bytes,   f->bytes + n, 0,          0};
}

/* Appends one fed row of request `r`: a token `depth` below the root, cached `offset` positions behind it. */
static void feed_row(TltFused *f, Fed *t, long r, int32_t token, long depth, long offset, long parent) {
    const long i = t->count++, cached = f->positions[r] + offset;
    const long block = f->block_tables[r * f->max_blocks + cached / f->block_size];
    t->token[i] = token;
    t->position[i] = (int32_t)(f->positions[r] + depth);
    t->slot[i] = (int32_t)(block * f->block_size + cached % f->block_size);
    t->parent[i] = (int32_t)parent;
    t->depth[i] = (int32_t)depth;
    t->identity[i] = (int32_t)i;
    f->row_keys[i] = row_key(f->keys[r], f->output_len[r] + depth);
    f->row_temperature[i] = f->temperature[r];
}

/* The root and the nodes of request `r`, which begin at `node`. Tokens, positions, slots and blocks are checked by the
 * forward. */
static int feed_request(TltFused *f, Fed *t, long r, long node, long count) {
    const long root = t->count;
    if (f->positions[r] < 0) return TLT_BAD_POSITION;
    if (((long)f->positions[r] + count) / f->block_size >= f->max_blocks) return TLT_BAD_BLOCK;
    t->start[r] = (int32_t)root;
    feed_row(f, t, r, f->token_ids[r], 0, 0, -1);
    for (long i = 0; i < count; i++, node++) {
        const long above = f->is_tree ? f->parents[node] : i - 1;
        if (above < -1 || above >= i) return TLT_BAD_PARENT;
        const long parent = root + 1 + above;
        feed_row(f, t, r, f->tokens[node], t->depth[parent] + 1, i + 1, parent);
    }
    return TLT_OK;
}

static int lay(TltFused *f, Fed *t) {
    long node = 0;
    for (long r = 0; r < f->rows; r++) {
        const long count = f->nodes ? f->counts[r] : 0;
        if (count < 0 || count > f->nodes - node) return TLT_BAD_SHAPE;
        int bad = feed_request(f, t, r, node, count);
        if (bad) return bad;
        node += count;
    }
    t->start[f->rows] = (int32_t)t->count;
    return node == f->nodes ? TLT_OK : TLT_BAD_SHAPE;
}

static int forward(const TltModel *m, const TltFused *f, const Fed *t, int threads) {
    TltStep s = {.tokens = (int32_t)t->count, .seqs = f->rows, .logits_rows = (int32_t)t->count};
    s.max_blocks = f->max_blocks;
    s.num_blocks = f->num_blocks;
    s.block_size = f->block_size;
    s.token_ids = t->token;
    s.positions = t->position;
    s.slots = t->slot;
    s.query_start = t->start;
    s.block_tables = f->block_tables;
    s.logit_rows = t->identity;
    s.parents = f->is_tree && f->nodes ? t->parent : NULL;
    s.branch = t->branch;
    s.kv = f->kv;
    s.logits = f->logits;
    s.hidden = f->pages ? f->hidden : NULL;
    s.routes = f->route_pages ? f->routes : NULL;
    return tlt_forward(m, &s, threads, 0);
}

static size_t state_bytes(const TltModel *m) { return (size_t)state_width(m) * sizeof(float); }

/* States and experts to their pages: fed row i's to its slot. */
static void keep(void *pages, const void *rows, size_t width, const Fed *t) {
    for (long i = 0; i < t->count && pages; i++)
        memcpy((char *)pages + (size_t)t->slot[i] * width, (const char *)rows + (size_t)i * width, width);
}

static void move_kept(void *pages, size_t width, const Fed *t, long moved) {
    for (long i = 0; i < moved && pages; i++)
        memcpy((char *)pages + (size_t)t->to[i] * width, (char *)pages + (size_t)t->from[i] * width, width);
}

/* What was cached for an accepted branch goes to where plain decoding would have put it. A branch only moves up, so
 * nothing is read after it was written. */
static int move(const TltModel *m, const TltFused *f, const Fed *t, long moved) {
    int bad = tlt_copy_slots(f->kv, m, f->num_blocks, f->block_size, t->from, t->to, moved);
    if (bad) return bad;
    move_kept(f->pages, state_bytes(m), t, moved);
    move_kept(f->route_pages, (size_t)m->route_bytes, t, moved);
    return TLT_OK;
}

/* Emits fed row `i`: the token drawn there and its log-probability. A team has drawn all rows at once; one thread draws
 * only where the path goes. Returns the token. */
static int32_t emit(const TltModel *m, TltFused *f, const Fed *t, long i) {
    const long at = f->emitted++;
    f->out_index[at] = (int32_t)i;
    if (t->all_drawn) {
        f->out_tokens[at] = t->drawn[i];
        f->out_logprobs[at] = f->drawn_logprobs[i];
    } else {
        tlt_keyed_sample(f->logits + i * m->vocab, 1, m->vocab, m->vocab, f->row_temperature + i, f->row_keys + i,
                         f->out_tokens + at, f->out_logprobs + at, f->sampling, 1);
    }
    return f->out_tokens[at];
}

/* Request `r`: emits its root and, from there, each first node that holds the token drawn at its parent. */
static void follow(const TltModel *m, TltFused *f, const Fed *t, long r, long *moved) {
    const long root = t->start[r], first = f->emitted;
    long last = root;
    int32_t next = emit(m, f, t, root);
    t->emitted[root] = 1;
    for (long i = root + 1; i < t->start[r + 1]; i++) {
        const long parent = t->parent[i], node = i - r - 1, within = f->emitted - first;
        const int is_next = parent == last && t->token[i] == next;
        f->reached[node] = t->emitted[parent];
        f->accepted[node] = t->emitted[i] = (uint8_t)is_next;
        if (!is_next) continue;
        if (i - root != within) { /* a branch: plain decoding would have cached it elsewhere */
            t->from[*moved] = t->slot[i];
            t->to[(*moved)++] = t->slot[root + within];
        }
        last = i;
        next = emit(m, f, t, i);
    }
    f->out_counts[r] = (int32_t)(f->emitted - first);
}

static int verify(const TltModel *m, TltFused *f, Fed *t, int threads) {
    long moved = 0;
    t->all_drawn = threads > 1;
    if (t->all_drawn)
        tlt_keyed_sample(f->logits, t->count, m->vocab, m->vocab, f->row_temperature, f->row_keys, t->drawn,
                         f->drawn_logprobs, f->sampling, threads);
    f->emitted = 0;
    for (long r = 0; r < f->rows; r++) follow(m, f, t, r, &moved);
    return moved ? move(m, f, t, moved) : TLT_OK;
}

static void decode(const TltModel *m, TltFused *f, int threads) {
    tlt_keyed_sample(f->logits, f->rows, m->vocab, m->vocab, f->row_temperature, f->row_keys, f->out_tokens,
                     f->out_logprobs, f->sampling, threads);
    f->emitted = f->rows;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Everything is checked before anything is computed; after an error the cache is as it was. */
int tlt_fused_step(const TltModel *m, TltFused *f, int threads) {
    Fed t = fed_in(f);
    int bad = f->block_size < 1 ? TLT_BAD_SHAPE : lay(f, &t);
    if (!bad) bad = forward(m, f, &t, threads);
    if (bad) return bad;
    keep(f->pages, f->hidden, state_bytes(m), &t);
    keep(f->route_pages, f->routes, (size_t)m->route_bytes, &t);
    const double started = now();
    if (f->nodes) bad = verify(m, f, &t, threads);
    else decode(m, f, threads);
    f->sample_seconds = now() - started;
    return bad;
}
