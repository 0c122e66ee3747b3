/* Keyed Gumbel sampling: token = argmax(logits / T + G), G from a counter-based hash of (row key, token id).
 *
 * The vocabulary is cut into chunks at fixed places; chunks are shared over threads and combined in order, so
 * the result does not depend on the thread count.
 */
#include <math.h>

#include "noise.h"
#include "pool.h"
#include "simd.h"
#include "tlt.h"

#define PIECE 4096 /* tokens per unit of work */

typedef struct {
    float max, sum; /* of logits / T: maximum, and sum of exp(x - max) */
    float best, best_logit;
    int32_t token;
} Partial;

typedef struct {
    const float *logits;
    int64_t rows, vocab, stride, pieces;
    const float *temperature;
    const uint64_t *keys;
    Partial *partial; /* [rows][pieces] */
} Sampling;

static void sample_piece(const Sampling *s, int64_t row, int64_t piece) {
    const float *logits = s->logits + row * s->stride;
    const int64_t first = piece * PIECE, last = first + PIECE < s->vocab ? first + PIECE : s->vocab;
    const float t = s->temperature[row];
    const vf divisor = vset(t > 0 ? t : 1.0f);
    Partial out = {-INFINITY, 0, -INFINITY, -INFINITY, (int32_t)first};
    vf top = vset(-INFINITY), best = vset(-INFINITY), best_x = vset(-INFINITY), sum = vzero();
    vi best_at = (vi){0} + (int32_t)first;
    float x[PIECE]; /* logits / T, filled up to whole vectors with what cannot win */
    const int64_t whole = (last - first) / VW * VW, count = (last - first + VW - 1) / VW * VW;
    for (int64_t i = 0; i < whole; i += VW) vstore(x + i, vload(logits + first + i) / divisor);
    for (int64_t i = whole; i < count; i++) x[i] = i < last - first ? logits[first + i] / divisor[0] : -INFINITY;
    for (int64_t i = 0; i < count; i += VW) top = vmax(top, vload(x + i));
    out.max = vmax_lanes(top);
    if (out.max > -INFINITY) {
        vi lane;
        for (int i = 0; i < VW; i++) lane[i] = i;
        for (int64_t i = 0; i < count; i += VW) {
            vf scaled = vload(x + i);
            sum = sum + vexp(scaled - vset(out.max));
            vf noisy = t > 0 ? scaled + gumbel(s->keys[row], first + i) : scaled;
            vi better = noisy > best;
            best = vselect(better, noisy, best);
            best_x = vselect(better, scaled, best_x);
            best_at = (best_at & ~better) | ((lane + (int32_t)(first + i)) & better);
        }
    }
    out.sum = vsum(sum);
    for (int i = 0; i < VW; i++)
        if (best[i] > out.best || (best[i] == out.best && best_at[i] < out.token)) {
            out.best = best[i];
            out.best_logit = best_x[i];
            out.token = best_at[i];
        }
    s->partial[row * s->pieces + piece] = out;
}

static void sample_unit(void *arg, long unit) {
    const Sampling *s = arg;
    sample_piece(s, unit / s->pieces, unit % s->pieces);
}

int64_t tlt_sample_scratch_bytes(int64_t rows, int64_t vocab) {
    return rows * ((vocab + PIECE - 1) / PIECE) * (int64_t)sizeof(Partial);
}

/* logits [rows][vocab] fp32 (row length `stride`), temperature [rows] (0: greedy), keys [rows]; scratch of
 * tlt_sample_scratch_bytes. Writes the token and log_softmax(logits / (T or 1))[token]. */
void tlt_keyed_sample(const float *logits, int64_t rows, int64_t vocab, int64_t stride, const float *temperature,
                      const uint64_t *keys, int32_t *token, float *logprob, void *scratch, int threads) {
    Sampling s = {logits, rows, vocab, stride, (vocab + PIECE - 1) / PIECE, temperature, keys, scratch};
    if (rows < 1) return;
    tlt_team_open(rows * s.pieces < threads ? (int)(rows * s.pieces) : threads);
    tlt_parallel(rows * s.pieces, sample_unit, &s);
    tlt_team_close();
    for (int64_t r = 0; r < rows; r++) {
        const Partial *p = s.partial + r * s.pieces, *best = p;
        double max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < s.pieces; i++) {
            if (p[i].best > best->best) best = &p[i];
            if (p[i].max > max) max = p[i].max;
        }
        for (int64_t i = 0; i < s.pieces; i++)
            if (p[i].sum > 0) sum += (double)p[i].sum * exp((double)p[i].max - max);
        token[r] = best->token;
        logprob[r] = (float)((double)best->best_logit - max - log(sum));
    }
}
