/* The experts of a layer: each row chooses k of E, the rows of an expert are gathered and multiplied together.
 *
 *   scores | choose | sort by expert | gather | gate, up, silu | down | mix        (and before it the shared expert's MLP)
 *
 * The experts of a row depend on its own scores only, each product is one chain of multiply-adds (gemm.c), and a row's
 * experts are summed in the order of its own choice: nothing of it depends on the rows beside it.
 *
 * Legend: N pairs of a row and one of its experts, numbered row * k + place.
 */
#include "decoder.h"

#include <math.h>

INLINE long score_stride(const TltModel *m) { return pad64(m->experts + 1); }

/* p = softmax of n scores stored up to `padded`; all NaN where a score is NaN or +inf. */
static void softmax(float *p, long n, long padded) {
    float top = p[0];
    for (long e = 1; e < n; e++) top = p[e] > top ? p[e] : top;
    for (long e = n; e < padded; e++) p[e] = -INFINITY;
    vf sum = vzero();
    for (long e = 0; e < padded; e += VW) {
        vf x = vexp(vload(p + e) - vset(top));
        vstore(p + e, x);
        sum += x;
    }
    const vf scale = vset(1.0f / vsum(sum));
    for (long e = 0; e < padded; e += VW) vstore(p + e, vload(p + e) * scale);
}

static void store_route(const Run *r, long row, long place, long expert) {
    const TltModel *m = r->m;
    const long at = (r->first + row) * m->route_bytes, within = m->layer[r->layer].route * m->topk + place;
    if (m->experts <= 256) ((uint8_t *)r->s->routed_experts)[at + within] = (uint8_t)expert;
    else ((int16_t *)r->s->routed_experts)[at / 2 + within] = (int16_t)expert;
}

/* Unit = one row: its k likeliest experts, ties to the lower number, and their gates; last the shared expert's gate. A row
 * of NaN takes the first expert k times, with a gate of NaN. */
static void choose_unit(void *arg, long row) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const long k = m->topk;
    float *p = m->scores + row * score_stride(m), *gates = m->gates + row * (k + 1), total = 0.0f;
    int32_t *chosen = m->chosen + row * k;
    gates[k] = 1.0f / (1.0f + expf(-p[m->experts])); /* not read without a shared expert */
    softmax(p, m->experts, score_stride(m));
    for (long j = 0; j < k; j++) {
        long best = 0;
        for (long e = 1; e < m->experts; e++) best = p[e] > p[best] ? e : best;
        chosen[j] = (int32_t)best;
        gates[j] = p[best];
        total += p[best];
        p[best] = -1.0f; /* below all others */
        if (r->s->routed_experts) store_route(r, row, j, best);
    }
    for (long j = 0; j < k && m->renormalise; j++) gates[j] /= total;
}

/* Counting sort of the pairs by expert, ascending within one: fills place, starts and active. Returns how many experts
 * have a row. */
static long sort_pairs(const Run *r) {
    const TltModel *m = r->m;
    const long pairs = r->rows * m->topk;
    int32_t *starts = m->starts;
    long count = 0;
    memset(starts, 0, (size_t)(m->experts + 1) * sizeof *starts);
    for (long i = 0; i < pairs; i++) m->place[i] = starts[m->chosen[i] + 1]++; /* first its place within the expert */
    for (long e = 0; e < m->experts; e++) {
        if (starts[e + 1]) m->active[count++] = (int32_t)e;
        starts[e + 1] += starts[e];
    }
    for (long i = 0; i < pairs; i++) m->place[i] += starts[m->chosen[i]];
    return count;
}

/* Unit = one row: its copies for each of its experts. */
static void gather_unit(void *arg, long row) {
    const Run *r = arg;
    const TltModel *m = r->m;
    for (long i = row * m->topk; i < (row + 1) * m->topk; i++)
        memcpy(m->pair_x + m->place[i] * r->hp, m->x + row * r->hp, (size_t)r->hp * sizeof(num));
}

/* Unit = one row: the sum of its experts' outputs times their gates. */
static void mix_unit(void *arg, long row) {
    const Run *r = arg;
    const TltModel *m = r->m;
    const float *gates = m->gates + row * (m->topk + 1);
    const int32_t *place = m->place + row * m->topk;
    for (long i = 0; i < r->hp; i += VW) {
        vf sum = vzero();
        for (long j = 0; j < m->topk; j++)
            sum = vfma(vset(gates[j]), vload(m->pair_out + place[j] * r->hp + i), sum);
        if (m->shared_inter) sum = vfma(vset(gates[m->topk]), vload(m->shared + row * r->hp + i), sum);
        if (m->tp > 1) vstore(m->part + row * r->hp + i, sum);
        else vstore(m->resid + row * r->hp + i, vload(m->resid + row * r->hp + i) + sum);
    }
}

void tlt_run_experts(Run *r) {
    const TltModel *m = r->m;
    const TltLayer *l = &m->layer[r->layer];
    const long panels = ((long)m->expert_inter + NR - 1) / NR, mid = pad64(m->expert_inter);
    const long h_panels = ((long)m->hidden + NR - 1) / NR;
    tlt_linear(r, m->x, r->hp, m->hidden, l->router, m->experts + (m->shared_inter > 0), EPI_STORE, NULL, m->scores,
               score_stride(m));
    tlt_parallel(r->rows, choose_unit, r);
    Groups groups = {m->starts, m->active, sort_pairs(r), 2 * panels * cells(m->hidden) * NR * PER};
    tlt_parallel(r->rows, gather_unit, r);
    Gemm up = {EPI_SILU, 0, 2 * panels * NR, m->hidden, m->pair_x, r->hp, l->expert_gate_up, NULL, m->pair_mid,
               mid, 1};
    tlt_gemm_groups(&up, &groups, r->threads);
    Gemm down = {EPI_STORE, 0, m->hidden, m->expert_inter, m->pair_mid, mid, l->expert_down, NULL, m->pair_out,
                 r->hp, 1};
    groups.w_size = h_panels * cells(m->expert_inter) * NR * PER;
    tlt_gemm_groups(&down, &groups, r->threads);
    if (m->shared_inter) tlt_run_mlp(r, m->shared_inter, EPI_STORE, m->shared);
    tlt_parallel(r->rows, mix_unit, r);
}
