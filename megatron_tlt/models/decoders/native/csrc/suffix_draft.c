/* Drafts from suffix tries: the likely continuations of a request's contexts, under the policy's own sampling noise.
 *
 * The next token's distribution is interpolated over all contexts, longest first: a context with total count n and u
 * different continuations keeps the share n / (n + u) of the rest and passes u to the shorter ones (Witten and Bell
 * 1991, method C). The candidate with the largest log share + keyed Gumbel noise is drafted: the token that the policy
 * would draw if its distribution were this one (docs/design/numerics.md).
 */
#include <math.h>

#include "noise.h"
#include "suffix.h"

#define MOST_CANDIDATES 16
#define MOST_CHILDREN 8  /* looked at in one node */
#define NEGLIGIBLE 0.0313f /* share of the shorter contexts below which they are left out */

typedef struct {
    int32_t token;
    float share, score;
} Candidate;

typedef struct {
    Candidate item[MOST_CANDIDATES];
    int size, longest; /* tokens of the longest context that something followed */
    float rest;        /* share of tokens that no context has seen */
} Candidates;

static void add(Candidates *c, int32_t token, float share) {
    for (int i = 0; i < c->size; i++)
        if (c->item[i].token == token) {
            c->item[i].share += share;
            return;
        }
    if (c->size < MOST_CANDIDATES) c->item[c->size++] = (Candidate){token, share, 0};
}

/* Mixes in the continuations of one context. */
static void add_context(SuffixPool *pool, SuffixTrie *t, uint32_t v, Candidates *c) {
    suffix_expand(pool, t, v);
    const SuffixNode *n = &t->node[v];
    if (n->lazy || !n->total) return;
    if (!c->longest) c->longest = n->depth;
    const float pass = (float)n->fan, unit = c->rest / ((float)n->total + pass);
    int seen = 0;
    for (uint32_t child = n->head; child && seen < MOST_CHILDREN; child = t->node[child].next, seen++)
        add(c, t->node[child].token, unit * (float)t->node[child].count);
    c->rest = unit * pass;
}

/* Candidates for the next token, from the longest context to that of one token. */
static void gather(SuffixPool *pool, SuffixTrie *t, uint32_t at, Candidates *c) {
    c->size = 0, c->longest = 0, c->rest = 1;
    for (; at && c->rest > NEGLIGIBLE; at = t->node[at].suffix) add_context(pool, t, at, c);
}

/* Where a sequence that stands on `v` would stand after `token`; the trie is not changed but for lazy nodes. */
static uint32_t follow(SuffixPool *pool, SuffixTrie *t, uint32_t v, int32_t token) {
    for (;; v = t->node[v].suffix) {
        suffix_expand(pool, t, v);
        const uint32_t child = suffix_find(t, v, token);
        if (child) return t->node[child].depth > pool->depth ? t->node[child].suffix : child;
        if (!v) return 0;
    }
}

/* Brings the best candidate to the front; of equal scores the smaller token is best. */
static void rank(Candidates *c, int is_noisy, uint64_t key) {
    int best = 0;
    for (int i = 0; i < c->size; i++) {
        Candidate *x = &c->item[i];
        x->score = logf(x->share) + (is_noisy && c->size > 1 ? gumbel(key, x->token)[0] : 0);
        const float more = x->score - c->item[best].score;
        if (more > 0 || (more == 0 && x->token < c->item[best].token)) best = i;
    }
    const Candidate x = c->item[0];
    c->item[0] = c->item[best], c->item[best] = x;
}

static int step_of(int x, const int *bounds) {
    int i = 0;
    while (i < SUFFIX_STEPS - 1 && x >= bounds[i]) i++;
    return i;
}

/* Table index of a drafted token: by its share, the longest context, and how many candidates there were. */
static int feature_of(const Candidates *c) {
    static const int contexts[] = {3, 5, 8, 12}, sizes[] = {2, 3, 5, 9};
    const float share = c->item[0].share, other = 1 - share;
    const float odds = logf(share / (other > 1e-4f ? other : 1e-4f)) + SUFFIX_ODDS / 4;
    const int i = odds < 1 ? 0 : odds < SUFFIX_ODDS ? (int)odds : SUFFIX_ODDS - 1;
    return (i * SUFFIX_STEPS + step_of(c->longest, contexts)) * SUFFIX_STEPS + step_of(c->size, sizes);
}

/* Drafts for one row, which stands on `at`, behind `total` tokens of the rows before; returns the number of its
 * tokens. */
static int draft_row(SuffixPool *pool, SuffixTrie *t, uint32_t at, const SuffixRows *q, int32_t row, int total) {
    const int is_noisy = q->temperature[row] > 0;
    const int length = q->lengths[row];
    float cumulative_acceptance = 1;
    int count = 0;
    for (; count < length; count++, total++) {
        Candidates c;
        gather(pool, t, at, &c);
        if (!c.size) break;
        rank(&c, is_noisy, row_key(q->keys[row], q->output_len[row] + count));
        const int feature = feature_of(&c);
        cumulative_acceptance *= q->rates[feature];
        if (cumulative_acceptance < q->min_cumulative_acceptance) break;
        q->tokens[total] = c.item[0].token, q->feature[total] = feature;
        q->cumulative_acceptance[total] = cumulative_acceptance;
        at = follow(pool, t, at, c.item[0].token);
    }
    return count;
}

/* Drafts for all rows, row after row; returns the number of tokens, or a negative error. */
int tlt_suffix_propose(SuffixPool *pool, const SuffixRows *q) {
    int total = 0;
    for (int32_t row = 0; row < q->rows; row++)
        if (q->lengths[row] > SUFFIX_MAX_LENGTH) return SUFFIX_BAD_HANDLE;
    for (int32_t row = 0; row < q->rows; row++) {
        const int32_t *handle = q->handles + 2 * (int64_t)q->slots[row];
        SuffixTrie *t = handle[0] >= 0 && handle[0] < pool->tries ? pool->trie[handle[0]] : NULL;
        if (t && (handle[1] < 0 || handle[1] >= (int32_t)t->texts)) t = NULL;
        q->counts[row] = t ? draft_row(pool, t, t->text[handle[1]].at, q, row, total) : 0;
        total += q->counts[row];
    }
    return total;
}
