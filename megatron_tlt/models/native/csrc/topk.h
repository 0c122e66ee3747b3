/* The best few of keyed, perturbed scores: logits / T + G. */
#ifndef TLT_TOPK_H
#define TLT_TOPK_H

#include <stdint.h>

#define TOPK_MOST 4

typedef struct {
    float score[TOPK_MOST]; /* best first; of equal scores the lower token first */
    int32_t token[TOPK_MOST];
} TopK;

typedef struct {
    const float *logits; /* [.][vocab], row length `stride` */
    int64_t vocab, stride;
    int n;               /* candidates wanted, at most TOPK_MOST and the vocabulary */
    /* Row i reads logits row at[i] and belongs to request which[i]. */
    const int32_t *at, *which;
    const float *temperature;   /* of requests; 0: no noise */
    const uint64_t *keys;       /* of requests */
    const int32_t *positions;   /* of requests: output position of the row's token, less `ahead` */
    int64_t ahead;
    TopK *out; /* [rows][pieces], then the result in [row][0] */
} TopKRows;

/* Pieces that a vocabulary is cut into. */
int64_t topk_pieces(int64_t vocab);

/* Runs on the open team. The result of row i is out[i * pieces]. */
void topk_rows(TopKRows *t, int64_t rows);

#endif
