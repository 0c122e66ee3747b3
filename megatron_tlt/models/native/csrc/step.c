/* What a forward may safely compute, and how its rows are grouped for attention. */
#include "attention.h"
#include "decoder.h"

/* The slot that the block table gives a position. */
static long slot_of(const TltStep *s, long seq, long position) {
    return (long)s->block_tables[seq * s->max_blocks + position / s->block_size] * s->block_size +
           position % s->block_size;
}

static int check_rows(const TltModel *m, const TltStep *s) {
    for (long i = 0; i < s->tokens; i++) {
        if (s->token_ids[i] < 0 || s->token_ids[i] >= m->vocab) return TLT_BAD_TOKEN;
        if (s->positions[i] < 0 || s->positions[i] >= m->rope_len) return TLT_BAD_POSITION;
        if (s->slots[i] < 0 || s->slots[i] >= (long)s->num_blocks * s->block_size) return TLT_BAD_SLOT;
    }
    for (long i = 0; i < s->logits_rows; i++)
        if (s->logit_rows[i] < (i ? s->logit_rows[i - 1] + 1 : 0) || s->logit_rows[i] >= s->tokens) return TLT_BAD_ROW;
    return TLT_OK;
}

/* Checks the parents of one sequence's rows and finds the branch rows: those whose key, or an ancestor's, lies elsewhere
 * than the block table says. (The block table is checked by now.) */
static int check_tree(const TltStep *s, long seq) {
    const long first = s->query_start[seq];
    for (long i = first; i < s->query_start[seq + 1]; i++) {
        const long parent = s->parents[i];
        if (i == first ? parent != -1 : (parent < first || parent >= i)) return TLT_BAD_PARENT;
        if (i > first && s->positions[i] != s->positions[parent] + 1) return TLT_BAD_PARENT;
        s->branch[i] = s->slots[i] != slot_of(s, seq, s->positions[i]) || (i > first && s->branch[parent]);
        if (s->branch[i] && s->positions[i] - s->positions[first] > TLT_MAX_BRANCH) return TLT_BAD_BRANCH;
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
    return s->parents ? check_tree(s, seq) : TLT_OK;
}

int tlt_check_step(const TltModel *m, const TltStep *s) {
    if (s->block_size < TILE || s->block_size % TILE) return TLT_BAD_SHAPE;
    if (m->head_dim > TLT_MAX_HEAD_DIM || m->head_dim % 2 || m->hidden % 2) return TLT_BAD_SHAPE;
    if (s->query_start[0] != 0 || s->query_start[s->seqs] != s->tokens) return TLT_BAD_SHAPE;
    int bad = check_rows(m, s);
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
            const int branch = s->parents && s->branch[a];
            for (rows = 1; !branch && rows < most && a + rows < b && !(s->parents && s->branch[a + rows]);) rows++;
            int32_t *u = m->units + 4 * r->units;
            u[0] = (int32_t)(a - r->first);
            u[1] = (int32_t)rows;
            u[2] = (int32_t)seq;
            u[3] = branch;
        }
    }
}

long tlt_branch_path(const TltStep *s, long seq, long row, int32_t *path) {
    long count = 0;
    for (; row >= 0 && s->branch[row]; row = s->parents[row]) {
        if (s->slots[row] == slot_of(s, seq, s->positions[row])) continue;
        path[2 * count] = s->positions[row];
        path[2 * count++ + 1] = s->slots[row];
    }
    return count;
}
