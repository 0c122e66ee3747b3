/* Drafts straight from the engine's rows and the paged hidden states of what they have said. */
#ifndef TLT_PAIRS_H
#define TLT_PAIRS_H

#include "tlt.h"

/* B rows (running requests), S slots: a request keeps its slot, rows are dense. At most W pairs of a row are fed, T <=
 * S * W. Row r's last token is at positions[r]; the pair at p is its token there and the hidden state of p - 1, which lies
 * in the pages where the block table says. The field order is repeated in native_pairs.py. */
typedef struct {
    int32_t rows, slots, window, width, max_blocks, num_blocks, block_size;
    int32_t drafting;  /* out: rows that were drafted for */
    int32_t nodes;     /* out: drafted tokens, or 0 if there is no `chains` */
    /* The rows, as the engine keeps them. */
    const int32_t *slot, *positions, *output_len, *block_tables; /* [B], [B], [B], [B][max_blocks] */
    const uint64_t *keys;                                        /* [B] */
    const float *temperature;                                    /* [B] */
    const int32_t *outputs;                                      /* [S][width], output_len of them */
    const int32_t *wanted;                                       /* [B] most tokens to draft */
    /* What the drafter remembers of each slot. */
    int32_t *synced, *first; /* [S] last position whose pair is cached, first one that the drafter sees */
    const void *pages;       /* [num_blocks * block_size] hidden states */
    void *kv;
    /* Scratch: [4][S * W], [TLT_PAIRS_INTS][S + 1], [S][max_blocks], [S], [S] */
    int32_t *pairs, *ints, *tables;
    uint64_t *own_keys;
    float *own_temperature;
    int32_t *chains; /* out: counts [B], then tokens, cumulative_acceptance (float), depths, features, [N] each; NULL: not wanted */
} TltPairs;

#define TLT_PAIRS_INTS 7

/* Feeds the pairs that are missing of every row that wants tokens, and drafts. Of `draft` only topk, depth,
 * min_cumulative_acceptance, rates, results and scratch are read, for as many sequences as rows want tokens, in order. A row whose last pair is
 * cached has nothing to start from and is left out. `ints` begin with the drafting rows' numbers. */
int tlt_draft_rows(const TltEagle *eagle, TltPairs *pairs, const TltDraft *draft, int threads);

#endif
