/* The trained drafter, of kind eagle or eagle3: a model of one layer with the policy's embedding.
 *
 * Legend: H hidden size, W width of the policy's state: H for eagle; for eagle3 4H, and it reads the first 3H. */
#ifndef TLT_EAGLE_H
#define TLT_EAGLE_H

#include "tlt.h"

#define TLT_POSITIONS 8
#define TLT_BUCKETS 32
#define TLT_BUCKET_WIDTH 0.25f

typedef struct {
    TltModel model; /* eagle: the policy's LM head, input_norm and final_norm NULL. eagle3: a head of its own, `vocab` tokens */
    const num *fc;   /* packed panels [H][2H]; eagle3: [H][3H] */
    num *pair;       /* [max_rows][3H up to a multiple of 64, + 64] */
    const float *hidden_norm; /* [Hp]; NULL: kind eagle */
    const int32_t *ids;       /* [model.vocab, up to a multiple of VW] the policy's ids of the drafter's tokens; NULL: the same */
    int32_t vocab, state_width, norm_before_residual; /* V of the policy; W; whether the residual stream is normed first */
} TltEagle;

/* T pairs: at position p the token there and the state of p - 1, which lies at `state_slots` of the pages. */
typedef struct {
    int32_t count, num_blocks, block_size;
    const int32_t *tokens, *positions, *slots, *state_slots; /* [T]; slots: where key and value go */
    const num *pages;                                        /* [num_blocks * block_size][W] */
    num *kv;
} TltPairs;

/* Drafts for B rows (running requests). S slots: a request keeps its slot, rows are dense. D = longest: tokens of a
 * draft at most. C = catch_up: missing pairs of a row that are cached, at most. The field order is repeated in abi.py. */
typedef struct {
    int32_t rows, slots, catch_up, width, max_blocks, num_blocks, block_size, longest;
    float min_acceptance; /* a chain ends before a token whose cumulative acceptance (product of rates) is below */
    /* The rows, as the engine keeps them. */
    const int32_t *slot, *positions, *output_len, *block_tables; /* [B], [B] of the last token, [B], [B][max_blocks] */
    const uint64_t *keys;                                        /* [B] request keys */
    const float *temperature;                                    /* [B] */
    const int32_t *outputs;                                      /* [S][width], output_len of them */
    const int32_t *wanted;                                       /* [B] most tokens to draft, at most D */
    int32_t *synced, *first; /* [S] last position whose pair is cached; first one that the drafter attends to */
    const num *pages;        /* [.][W] */
    num *kv;
    const float *rates; /* [TLT_POSITIONS][TLT_BUCKETS] */
    /* Out, of N drafted tokens row after row; room for B * D. */
    int32_t *counts;              /* [B] */
    int32_t *tokens, *feature;    /* [N] */
    float *cumulative_acceptance; /* [N] */
    void *scratch; /* tlt_draft_scratch_bytes */
} TltDraft;

/* Caches keys and values of pairs. */
int tlt_eagle_feed(const TltEagle *eagle, const TltPairs *pairs, int threads);

int64_t tlt_draft_scratch_bytes(const TltEagle *eagle, const TltDraft *draft);

/* Caches the pairs that are missing, at most the last C, of every row with wanted tokens, and drafts. A row whose last pair
 * is cached has nothing to start from and gets no draft. */
int tlt_draft_rows(const TltEagle *eagle, TltDraft *draft, int threads);

#endif
