/* Drafts from suffix tries: the likely continuations of a request's contexts, under the policy's own sampling noise.
 *
 * The next token's distribution is interpolated over all contexts, longest first, a request's own trie before the
 * common one at equal length: a context with total count n and u different continuations keeps the share
 * n / (n + u + a) of what is left and passes u + a to the shorter ones (Witten and Bell 1991, method C; `a` is more
 * doubt in the common trie). The candidate with the largest log share + keyed Gumbel noise is drafted: the token that
 * the policy would draw if its distribution were this one (DESIGN decision 2).
 */
#include <math.h>

#include "noise.h"
#include "suffix.h"

#define MOST_CANDIDATES 16
#define MOST_CHILDREN 8  /* looked at in one node */
#define MOST_LENGTH 64
#define DOUBT 2.0f        /* `a` of the common trie */
#define NEGLIGIBLE 0.0313f  /* share of the shorter contexts below which they are left out */

typedef struct {
    int32_t token;
    float share, score;
} Candidate;

typedef struct {
    Candidate item[MOST_CANDIDATES];
    int size, longest; /* tokens of the longest context that something followed */
    float rest;        /* share of tokens that no context has seen */
} Candidates;

typedef struct { /* one of a request's two tries, and where it stands in it */
    SuffixTrie *trie;
    uint32_t at;
} Place;

static void add(Candidates *c, int32_t token, float share) {
    for (int i = 0; i < c->size; i++)
        if (c->item[i].token == token) {
            c->item[i].share += share;
            return;
        }
    if (c->size < MOST_CANDIDATES) c->item[c->size++] = (Candidate){token, share, 0};
}

/* Mixes in what followed one context. */
static void add_context(SuffixPool *pool, SuffixTrie *t, uint32_t v, float doubt, Candidates *c) {
    suffix_expand(pool, t, v);
    const SuffixNode *n = &t->node[v];
    if (n->lazy || !n->total) return;
    if (!c->longest) c->longest = n->depth;
    const float pass = (float)n->fan + doubt, unit = c->rest / ((float)n->total + pass);
    int seen = 0;
    for (uint32_t child = n->head; child && seen < MOST_CHILDREN; child = t->node[child].next, seen++)
        add(c, t->node[child].token, unit * (float)t->node[child].count);
    c->rest = unit * pass;
}

/* Candidates for the next token, from the longest contexts to those of one token. */
static void gather(SuffixPool *pool, const Place *place, Candidates *c) {
    uint32_t own = place[0].at, common = place[1].at;
    c->size = 0, c->longest = 0, c->rest = 1;
    while ((own || common) && c->rest > NEGLIGIBLE) {
        const int d0 = own ? place[0].trie->node[own].depth : 0;
        const int d1 = common ? place[1].trie->node[common].depth : 0;
        if (d0 >= d1) {
            add_context(pool, place[0].trie, own, 0, c);
            own = place[0].trie->node[own].suffix;
        } else {
            add_context(pool, place[1].trie, common, DOUBT, c);
            common = place[1].trie->node[common].suffix;
        }
    }
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

/* Drafts for one row, behind `total` tokens of the rows before; returns the number of its tokens. */
static int draft_row(SuffixPool *pool, Place *place, const SuffixAsk *q, int32_t row, int total) {
    const int is_noisy = q->temperature[row] > 0;
    const int length = q->lengths[row] < q->longest ? q->lengths[row] : q->longest;
    float cumulative_acceptance = 1;
    int count = 0;
    for (; count < length; count++, total++) {
        Candidates c;
        gather(pool, place, &c);
        if (!c.size) break;
        rank(&c, is_noisy, row_key(q->keys[row], q->positions[row] + count));
        const int feature = feature_of(&c);
        cumulative_acceptance *= q->rates[feature];
        if (cumulative_acceptance < q->min_cumulative_acceptance) break;
        q->tokens[total] = c.item[0].token, q->feature[total] = feature;
        q->cumulative_acceptance[total] = cumulative_acceptance;
        for (int k = 0; k < 2; k++)
            if (place[k].trie) place[k].at = follow(pool, place[k].trie, place[k].at, c.item[0].token);
    }
    return count;
}

/* Drafts for all rows, row after row; returns the number of tokens, or a negative error. */
int tlt_suffix_propose(SuffixPool *pool, const SuffixAsk *q) {
    int total = 0;
    if (q->longest > MOST_LENGTH) return SUFFIX_BAD_HANDLE;
    for (int32_t row = 0; row < q->rows; row++) {
        Place place[2];
        for (int k = 0; k < 2; k++) {
            const int32_t *handle = q->handles + 4 * (int64_t)q->slots[row] + 2 * k;
            SuffixTrie *t = handle[0] >= 0 && handle[0] < pool->tries ? pool->trie[handle[0]] : NULL;
            if (t && (handle[1] < 0 || handle[1] >= (int32_t)t->texts)) t = NULL;
            place[k] = (Place){t, t ? t->text[handle[1]].at : 0};
        }
        q->counts[row] = draft_row(pool, place, q, row, total);
        total += q->counts[row];
    }
    return total;
}
