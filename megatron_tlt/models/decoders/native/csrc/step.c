/* Checks of a forward's inputs, and the grouping of its rows for attention. */
#include "attention.h"
#include "decoder.h"

int tlt_check_rows(const TltModel *m, const TltStep *s, int32_t vocab) {
    if (s->block_size < TILE || s->block_size % TILE) return TLT_BAD_SHAPE;
    if (m->head_dim > TLT_MAX_HEAD_DIM || m->head_dim % 2 || m->hidden % 2) return TLT_BAD_SHAPE;
    for (long i = 0; i < s->tokens; i++) {
        if (s->token_ids[i] < 0 || s->token_ids[i] >= vocab) return TLT_BAD_TOKEN;
        if (s->positions[i] < 0 || s->positions[i] >= m->rope_len) return TLT_BAD_POSITION;
        if (s->slots[i] < 0 || s->slots[i] >= (long)s->num_blocks * s->block_size) return TLT_BAD_SLOT;
    }
    return TLT_OK;
}

static int check_sequence(const TltStep *s, long seq) {
    long context = 0;
    if (s->query_start[seq + 1] < s->query_start[seq]) return TLT_BAD_SHAPE;
    for (long i = s->query_start[seq]; i < s->query_start[seq + 1]; i++)
        context = s->positions[i] >= context ? s->positions[i] + 1L : context;
    long blocks = (context + s->block_size - 1) / s->block_size;
    if (blocks > s->max_blocks) return TLT_BAD_BLOCK;
    for (long b = 0; b < blocks; b++) {
        int32_t id = s->block_tables[seq * s->max_blocks + b];
        if (id < 0 || id >= s->num_blocks) return TLT_BAD_BLOCK;
    }
    return TLT_OK;
}

int tlt_check_step(const TltModel *m, const TltStep *s) {
    if (s->query_start[0] != 0 || s->query_start[s->seqs] != s->tokens) return TLT_BAD_SHAPE;
    int bad = tlt_check_rows(m, s, m->vocab);
    for (long i = 0; i < s->logits_rows && !bad; i++)
        if (s->logit_rows[i] < (i ? s->logit_rows[i - 1] + 1 : 0) || s->logit_rows[i] >= s->tokens) bad = TLT_BAD_ROW;
    for (long seq = 0; seq < s->seqs && !bad; seq++) bad = check_sequence(s, seq);
    return bad;
}

void tlt_plan_chunk(Run *r) {
    const TltModel *m = r->m;
    const TltStep *s = r->s;
    const long group = m->heads / m->kv_heads, most = group >= MR ? 1 : MR / group, last = r->first + r->rows;
    r->units = 0;
    for (long seq = 0; seq < s->seqs; seq++) {
        long a = s->query_start[seq] > r->first ? s->query_start[seq] : r->first;
        long b = s->query_start[seq + 1] < last ? s->query_start[seq + 1] : last;
        for (long rows; a < b; a += rows, r->units++) {
            rows = b - a < most ? b - a : most;
            int32_t *u = m->units + 3 * r->units;
            u[0] = (int32_t)(a - r->first);
            u[1] = (int32_t)rows;
            u[2] = (int32_t)seq;
        }
    }
}
