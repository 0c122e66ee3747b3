/* Keyed scores logits / T + G: the best few of each row, for sampling and for drafting. */
#ifndef TLT_SAMPLE_H
#define TLT_SAMPLE_H

#include <stdint.h>

#define TOPK_MOST 2

typedef struct {
    float score[TOPK_MOST]; /* best first; of equal scores the lower token first */
    int32_t token[TOPK_MOST];
    float max, sum; /* of x = logits / T: the largest, and the sum of exp(x - max) */
} Best;

typedef struct {
    const float *logits; /* [rows][vocab], row length `stride` */
    int64_t rows, vocab, stride;
    int n;                    /* candidates wanted, at most TOPK_MOST and the vocabulary */
    const float *temperature; /* [rows], 0: no noise */
    const uint64_t *keys;     /* [rows] row keys */
    const int32_t *ids;       /* [vocab, up to a multiple of VW] ascending tokens of the columns; NULL: 0, 1, ... */
    Best *best;               /* [rows][tlt_segments(vocab)] */
} Scoring;

/* Segments that a vocabulary is cut into. */
int64_t tlt_segments(int64_t vocab);

/* Fills `best` segment by segment, on the open team; then the first one of a row has the row's candidates. */
void tlt_score(const Scoring *s);

#endif
