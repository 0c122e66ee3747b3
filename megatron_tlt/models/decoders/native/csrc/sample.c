/* Keyed Gumbel sampling: token = argmax(logits / T + G), G from a counter-based hash of (row key, token id).
 *
 * The vocabulary is cut into segments at fixed places; segments are shared over threads and combined in order, so
 * the result does not depend on the thread count.
 */
#include "sample.h"

#include <math.h>
#include <stdlib.h>

#include "noise.h"
#include "pool.h"
#include "tlt.h"

#define SEGMENT 4096 /* tokens per unit of work */

int64_t tlt_segments(int64_t vocab) { return (vocab + SEGMENT - 1) / SEGMENT; }

INLINE int any(vi mask) {
    uint64_t words[VW / 2], all = 0;
    memcpy(words, &mask, sizeof mask);
    for (int i = 0; i < VW / 2; i++) all |= words[i];
    return all != 0;
}

/* Keeps the `n` best; offered in ascending order of token, so equals rank behind. */
static void offer(Best *best, int n, float score, int32_t token) {
    int i = n - 1;
    if (!(score > best->score[i])) return;
    for (; i > 0 && score > best->score[i - 1]; i--) {
        best->score[i] = best->score[i - 1];
        best->token[i] = best->token[i - 1];
    }
    best->score[i] = score;
    best->token[i] = token;
}

/* The largest of `count` scores, and the sum of their exponentials below it: NaN where a score is NaN, which the maximum
 * does not pass on. */
static void measure(const float *x, int64_t count, Best *best) {
    vf top = vset(-INFINITY), sum = vzero();
    vi strange = {0};
    for (int64_t i = 0; i < count; i += VW) {
        const vf score = vload(x + i);
        top = vmax(top, score);
        strange |= score != score;
    }
    best->max = vmax_lanes(top);
    for (int64_t i = 0; i < count && best->max > -INFINITY; i += VW) sum = sum + vexp(vload(x + i) - vset(best->max));
    best->sum = any(strange) ? NAN : vsum(sum);
}

/* Unit = one segment of one row. Passes without branches keep several vectors in flight. */
static void score_unit(void *arg, long unit) {
    const Scoring *s = arg;
    const int64_t segments = tlt_segments(s->vocab), row = unit / segments, first = unit % segments * SEGMENT;
    const int64_t count = s->vocab - first < SEGMENT ? s->vocab - first : SEGMENT, whole = count / VW * VW;
    const float *logits = s->logits + row * s->stride + first, t = s->temperature[row];
    const int32_t *ids = s->ids ? s->ids + first : NULL;
    const uint64_t key = s->keys[row];
    const vf divisor = vset(t > 0 ? t : 1.0f);
    Best best = {.sum = 0};
    float x[SEGMENT]; /* filled up to whole vectors with scores that cannot win */
    for (int i = 0; i < TOPK_MOST; i++) best.score[i] = -INFINITY;
    for (int64_t v = 0; v < whole; v += VW) vstore(x + v, vload(logits + v) / divisor);
    for (int64_t v = whole; v % VW || v < count; v++) x[v] = v < count ? logits[v] / divisor[0] : -INFINITY;
    measure(x, count, &best);
    for (int64_t v = 0; v < count && t > 0 && !ids; v += VW) vstore(x + v, vload(x + v) + gumbel(key, first + v));
    for (int64_t v = 0; v < count && t > 0 && ids; v += VW) vstore(x + v, vload(x + v) + gumbel_at(key, ids + v));
    for (int64_t v = 0; v < count; v += VW) {
        if (!any(vload(x + v) > vset(best.score[s->n - 1]))) continue;
        for (int64_t i = v; i < v + VW && i < count; i++) offer(&best, s->n, x[i], ids ? ids[i] : (int32_t)(first + i));
    }
    s->best[unit] = best;
}

void tlt_score(const Scoring *s) {
    const int64_t segments = tlt_segments(s->vocab);
    tlt_parallel(s->rows * segments, score_unit, (void *)s);
    for (int64_t r = 0; r < s->rows; r++) {
        Best *all = s->best + r * segments;
        for (int64_t p = 1; p < segments; p++)
            for (int i = 0; i < s->n; i++) offer(all, s->n, all[p].score[i], all[p].token[i]);
    }
}

/* logits [rows][vocab] fp32 (row length `stride`), temperature [rows] (0: greedy), keys [rows]. Writes the token and
 * log_softmax(logits / (T or 1))[token]. */
int tlt_keyed_sample(const float *logits, int64_t rows, int64_t vocab, int64_t stride, const float *temperature,
                     const uint64_t *keys, int32_t *token, float *logprob, int threads) {
    const int64_t segments = tlt_segments(vocab);
    Best *best = malloc((size_t)(rows * segments) * sizeof *best);
    if (rows > 0 && !best) return TLT_NO_MEMORY;
    const Scoring s = {logits, rows, vocab, stride, 1, temperature, keys, NULL, best};
    tlt_team_open(rows * segments < threads ? (int)(rows * segments) : threads);
    tlt_score(&s);
    tlt_team_close();
    for (int64_t r = 0; r < rows; r++) {
        const Best *p = best + r * segments;
        double max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < segments; i++)
            if (p[i].max > max) max = p[i].max;
        for (int64_t i = 0; i < segments; i++)
            if (p[i].sum != 0) sum += (double)p[i].sum * exp((double)p[i].max - max);
        token[r] = p->token[0];
        const float x = logits[r * stride + token[r]] / (temperature[r] > 0 ? temperature[r] : 1.0f);
        logprob[r] = (float)((double)x - max - log(sum));
    }
    free(best);
    return TLT_OK;
}
