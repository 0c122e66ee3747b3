/* The best few of keyed, perturbed scores, for drafting.
 *
 * The noise of token v at output position t of a request is the sampler's (noise.h), with its row keys.
 * Scores are sample.c's, too: logits / T + G, and plain logits where T is 0. Large vocabularies are cut at fixed
 * places and combined in order, so threads change nothing.
 */
#include "topk.h"

#include <math.h>

#include "noise.h"
#include "pool.h"
#include "tlt.h"

#define PIECE 4096 /* tokens per unit of work */

INLINE int any(vi mask) {
    uint64_t words[VW / 2], all = 0;
    memcpy(words, &mask, sizeof mask);
    for (int i = 0; i < VW / 2; i++) all |= words[i];
    return all != 0;
}

/* Keeps the `n` best; offered in ascending order of token, so equals rank behind. */
static void offer(TopK *best, int n, float score, int32_t token) {
    int i = n - 1;
    if (!(score > best->score[i])) return;
    for (; i > 0 && score > best->score[i - 1]; i--) {
        best->score[i] = best->score[i - 1];
        best->token[i] = best->token[i - 1];
    }
    best->score[i] = score;
    best->token[i] = token;
}

static void topk_piece(const TopKRows *t, int64_t row, int64_t piece, int64_t pieces) {
    const int32_t request = t->which[row];
    const int64_t first = piece * PIECE, count = t->vocab - first < PIECE ? t->vocab - first : PIECE;
    const float *logits = t->logits + t->at[row] * t->stride + first, temperature = t->temperature[request];
    const uint64_t key = row_key(t->keys[request], t->positions[request] + t->ahead);
    const vf divisor = vset(temperature > 0 ? temperature : 1.0f);
    TopK best;
    float score[PIECE + VW];
    for (int i = 0; i < TOPK_MOST; i++) best.score[i] = -INFINITY, best.token[i] = 0;
    /* Two passes: without branches in it the first keeps several vectors in flight. */
    for (int64_t v = 0; v < count; v += VW) {
        float tail[VW];
        const float *at = logits + v;
        if (count - v < VW) {
            for (int i = 0; i < VW; i++) tail[i] = v + i < count ? at[i] : -INFINITY;
            at = tail;
        }
        vf x = vload(at) / divisor;
        if (temperature > 0) x = x + gumbel(key, first + v);
        vstore(score + v, x);
    }
    for (int64_t v = 0; v < count; v += VW) {
        if (!any(vload(score + v) > vset(best.score[t->n - 1]))) continue;
        for (int64_t i = v; i < v + VW && i < count; i++) offer(&best, t->n, score[i], (int32_t)(first + i));
    }
    t->out[row * pieces + piece] = best;
}

static void topk_unit(void *arg, long unit) {
    const TopKRows *t = arg;
    const int64_t pieces = topk_pieces(t->vocab);
    topk_piece(t, unit / pieces, unit % pieces, pieces);
}

int64_t topk_pieces(int64_t vocab) { return (vocab + PIECE - 1) / PIECE; }

void topk_rows(TopKRows *t, int64_t rows) {
    const int64_t pieces = topk_pieces(t->vocab);
    tlt_parallel(rows * pieces, topk_unit, t);
    for (int64_t r = 0; r < rows; r++) {
        TopK *all = t->out + r * pieces;
        for (int64_t p = 1; p < pieces; p++)
            for (int i = 0; i < t->n; i++) offer(all, t->n, all[p].score[i], all[p].token[i]);
    }
}
