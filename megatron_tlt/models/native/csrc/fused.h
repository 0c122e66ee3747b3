/* One decoding step in one call: the rows that are fed, the forward, the keyed draws and what is accepted. */
#ifndef TLT_FUSED_H
#define TLT_FUSED_H

#include "tlt.h"

/* D rows (requests), N drafted nodes of all of them (0: plain decoding), T = D + N fed rows, E <= T emitted tokens.
 * A row's block of fed rows is its root, then its nodes; node i of a row is cached at the slot of position root + 1 + i.
 * The field order is repeated in abi.py. */
typedef struct {
    int32_t rows, nodes, is_tree, max_blocks, num_blocks, block_size;
    int32_t emitted;       /* out: E */
    double sample_seconds; /* out: from the end of the forward on */
    /* The rows, as the engine keeps them. */
    const int32_t *token_ids, *positions, *output_len; /* [D] to feed; its position; output position of the next */
    const int32_t *block_tables;                       /* [D][max_blocks] */
    const uint64_t *keys;                              /* [D] of the requests */
    const float *temperature;                          /* [D], 0: greedy */
    /* The draft. Parents, of trees only, count within the row's nodes; -1: the root. */
    const int32_t *counts, *tokens, *parents; /* [D], [N], [N] */
    float *kv;
    float *pages; /* [num_blocks * block_size][W]: a token's state at its slot; NULL: off */
    void *route_pages; /* [num_blocks * block_size][route_bytes]: its experts likewise; NULL: off */
    /* Scratch: [TLT_FUSED_INTS][T + 1], [T], [T], [2][T + 1], [T][V], [T][W], [T][route_bytes],
     * tlt_sample_scratch_bytes(T, V) */
    int32_t *ints;
    uint64_t *row_keys;
    float *row_temperature;
    uint8_t *bytes;
    float *logits;
    float *hidden;
    void *routes;
    void *sampling;
    /* Out: what each row emits, the fed rows that it is drawn at, and the verdict on every node. */
    int32_t *out_tokens, *out_index, *out_counts; /* [E], [E], [D] */
    float *out_logprobs;                          /* [E] */
    uint8_t *accepted, *reached;                  /* [N] */
    float *drawn_logprobs;                        /* scratch [T] */
} TltFused;

#define TLT_FUSED_INTS 10

int tlt_fused_step(const TltModel *model, TltFused *fused, int threads);

#endif
