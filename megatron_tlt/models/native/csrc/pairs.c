/* From the engine's rows to a draft in one call: which pairs are missing, where they are cached, what they are made of.
 *
 * Numbers of a few rows cost less one by one than as arrays, and nothing is copied but them: hidden states are read in
 * their pages. What they lead to is checked by the draft (all blocks of a row, so all of its slots); here only what is
 * read here.
 */
#include "pairs.h"

#include <string.h>

#include "eagle.h"

/* The batch, in scratch: of each pair, and of each of the S sequences that draft. */
typedef struct {
    int32_t *token, *position, *slot, *state;
    int32_t *row, *start, *context, *last, *first, *output_position, *most;
    long count;
} Laid;

static Laid laid_in(const TltPairs *p) {
    const long t = (long)p->slots * p->window, s = p->slots + 1L;
    int32_t *a = p->pairs, *b = p->ints;
    return (Laid){a, a + t, a + 2 * t, a + 3 * t, b, b + s, b + 2 * s, b + 3 * s, b + 4 * s, b + 5 * s, b + 6 * s, 0};
}

/* The slot that a row's block table gives a position. */
static int32_t slot_of(const TltPairs *p, const int32_t *table, long position) {
    return (int32_t)(table[position / p->block_size] * (long)p->block_size + position % p->block_size);
}

/* The pairs between the drafter's last one and row r's last token, or the last W of them. */
static int lay_row(TltPairs *p, Laid *l, long r) {
    const long slot = p->slot[r], last = p->positions[r], drawn = p->output_len[r];
    if (slot < 0 || slot >= p->slots) return TLT_BAD_SHAPE;
    const long next = p->synced[slot] + 1L, oldest = last - p->window + 1;
    const long begin = next > oldest ? next : oldest, seq = p->drafting;
    if (begin > last) return TLT_OK;
    if (begin < 1 || drawn > p->width || last - begin >= drawn) return TLT_BAD_SHAPE;
    if (last / p->block_size >= p->max_blocks) return TLT_BAD_BLOCK;
    if (begin > next) p->first[slot] = (int32_t)begin; /* too late for those before */
    const int32_t *table = p->block_tables + r * p->max_blocks, *outputs = p->outputs + slot * p->width;
    for (long at = begin; at <= last; at++) {
        const long i = l->count++;
        l->token[i] = outputs[drawn - 1 - (last - at)];
        l->position[i] = (int32_t)at;
        l->slot[i] = slot_of(p, table, at);
        l->state[i] = slot_of(p, table, at - 1);
    }
    long blocks = (last + p->wanted[r]) / p->block_size + 1;
    if (blocks > p->max_blocks) blocks = p->max_blocks;
    memcpy(p->tables + seq * p->max_blocks, table, (size_t)blocks * sizeof *table);
    l->row[seq] = (int32_t)r;
    l->context[seq] = (int32_t)last + 1;
    l->first[seq] = p->first[slot];
    l->output_position[seq] = (int32_t)drawn;
    l->most[seq] = p->wanted[r];
    p->own_keys[seq] = p->keys[r];
    p->own_temperature[seq] = p->temperature[r];
    l->last[seq] = (int32_t)l->count - 1;
    l->start[seq + 1] = (int32_t)l->count;
    p->drafting++;
    return TLT_OK;
}

static int draft(const TltEagle *e, const TltPairs *p, const Laid *l, TltDraft *d, int threads) {
    TltEagleStep s = {.step = {.tokens = (int32_t)l->count, .seqs = p->drafting, .logits_rows = p->drafting}};
    s.step.max_blocks = p->max_blocks;
    s.step.num_blocks = p->num_blocks;
    s.step.block_size = p->block_size;
    s.step.token_ids = l->token;
    s.step.positions = l->position;
    s.step.slots = l->slot;
    s.step.query_start = l->start;
    s.step.context_lens = l->context;
    s.step.block_tables = p->tables;
    s.step.logit_rows = l->last;
    s.step.kv = p->kv;
    s.states = p->pages;
    s.first_visible = l->first;
    d->keys = p->own_keys;
    d->output_positions = l->output_position;
    d->temperature = p->own_temperature;
    d->max_len = l->most;
    return tlt_eagle_draft_at(e, &s, l->state, d, threads);
}

/* The best candidates, flat in row order, with what the calibrator wants to know: place and gap of each. */
static void flatten(TltPairs *p, const Laid *l, const TltDraft *d) {
    int32_t *counts = p->chains;
    memset(counts, 0, (size_t)p->rows * sizeof *counts);
    for (long q = 0; q < p->drafting; q++) p->nodes += counts[l->row[q]] = d->lengths[q];
    int32_t *token = counts + p->rows, *depth = token + 2L * p->nodes, *feature = depth + p->nodes;
    float *cumulative_acceptance = (float *)(token + p->nodes);
    for (long q = 0, i = 0; q < p->drafting; q++)
        for (long n = 0; n < d->lengths[q]; n++, i++) {
            const long at = q * d->depth + n, place = n < TLT_DEPTHS ? n : TLT_DEPTHS - 1;
            const float steps = d->gaps[at * d->topk] / TLT_BUCKET_WIDTH;
            const int bucket = steps < TLT_BUCKETS - 1 ? (int)steps : TLT_BUCKETS - 1;
            token[i] = d->tokens[at * d->topk];
            cumulative_acceptance[i] = d->cumulative_acceptance[at];
            depth[i] = (int32_t)n + 1;
            feature[i] = (int32_t)place * TLT_BUCKETS + bucket;
        }
}

int tlt_draft_rows(const TltEagle *e, TltPairs *p, const TltDraft *d, int threads) {
    Laid l = laid_in(p);
    TltDraft own = *d;
    int bad = p->rows > p->slots || p->block_size < 1 ? TLT_BAD_SHAPE : TLT_OK;
    p->drafting = p->nodes = 0;
    l.start[0] = 0;
    for (long r = 0; r < p->rows && !bad; r++)
        if (p->wanted[r] > 0) bad = lay_row(p, &l, r);
    if (!bad && p->drafting) bad = draft(e, p, &l, &own, threads);
    if (bad) return bad;
    for (long q = 0; q < p->drafting; q++) p->synced[p->slot[l.row[q]]] = p->positions[l.row[q]];
    if (p->chains) flatten(p, &l, d);
    return TLT_OK;
}
