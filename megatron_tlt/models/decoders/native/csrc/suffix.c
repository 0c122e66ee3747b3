/* Suffix tries: memory, insertion, and the functions called through ctypes (native/suffix_abi.py). See suffix.h. */
#include "suffix.h"

#include <stdlib.h>
#include <string.h>

/* realloc within the pool's budget; NULL (and nothing changed) when it is used up. */
static void *resize(SuffixPool *pool, void *old, int64_t old_bytes, int64_t bytes) {
    if (pool->bytes - old_bytes + bytes > pool->max_bytes) return NULL;
    void *grown = realloc(old, (size_t)bytes);
    if (grown) pool->bytes += bytes - old_bytes;
    return grown;
}

static void put(SuffixTrie *t, uint32_t child) {
    const uint32_t mask = t->table_size - 1;
    uint64_t key = (uint64_t)t->node[child].parent << 32 | (uint32_t)t->node[child].token;
    uint32_t i = (uint32_t)(key * 0x9E3779B97F4A7C15ull >> 32) & mask;
    while (t->table[i]) i = (i + 1) & mask;
    t->table[i] = child;
}

static int grow_nodes(SuffixPool *pool, SuffixTrie *t) {
    const int64_t have = t->node_capacity, want = have ? 2 * have : 64, size = sizeof(SuffixNode);
    SuffixNode *node = want > UINT32_MAX / 4 ? NULL : resize(pool, t->node, have * size, want * size);
    if (!node) return 0;
    t->node = node, t->node_capacity = (uint32_t)want;
    return 1;
}

static int grow_table(SuffixPool *pool, SuffixTrie *t) {
    const int64_t have = t->table_size, want = have ? 2 * have : 128;
    uint32_t *table = resize(pool, t->table, 4 * have, 4 * want);
    if (!table) return 0;
    memset(table, 0, 4 * (size_t)want);
    t->table = table, t->table_size = (uint32_t)want;
    for (uint32_t i = 1; i < t->nodes; i++) put(t, i);
    return 1;
}

/* Room for one more node; the table stays at most half full. */
static int reserve(SuffixPool *pool, SuffixTrie *t) {
    if (t->is_full) return 0;
    if (t->nodes == t->node_capacity && !grow_nodes(pool, t)) t->is_full = 1;
    else if (2 * (uint64_t)t->nodes >= t->table_size && !grow_table(pool, t)) t->is_full = 1;
    return !t->is_full;
}

/* A new child of `parent`, lazy, its occurrence being `sequence` up to `position`; 0 when memory is used up. */
static uint32_t add_child(SuffixPool *pool, SuffixTrie *t, uint32_t parent, int32_t token, uint32_t suffix,
                          uint32_t sequence, uint32_t position) {
    if (!reserve(pool, t)) return 0;
    const uint32_t child = t->nodes++;
    SuffixNode *p = &t->node[parent];
    const uint32_t after = p->head, before = after ? t->node[after].next : 0;
    /* Second in its parent's list: the newest of the rare ones comes first. */
    t->node[child] = (SuffixNode){.parent = parent, .suffix = suffix, .next = before, .prev = after, .head = sequence,
                                  .total = position, .count = 1, .token = token,
                                  .depth = (uint8_t)(p->depth + 1), .lazy = 1};
    if (before) t->node[before].prev = child;
    if (after) t->node[after].next = child;
    else p->head = child;
    p->fan++;
    p->total++;
    put(t, child);
    return child;
}

/* Counts one more occurrence of `child`, which may overtake its neighbour. */
static void count(SuffixTrie *t, uint32_t child) {
    SuffixNode *c = &t->node[child], *p = &t->node[c->parent];
    c->count++;
    p->total++;
    const uint32_t left = c->prev;
    if (!left || t->node[left].count >= c->count) return;
    SuffixNode *l = &t->node[left];
    const uint32_t outer = l->prev, right = c->next;
    c->prev = outer, c->next = left, l->prev = child, l->next = right;
    if (right) t->node[right].prev = left;
    if (outer) t->node[outer].next = child;
    else p->head = child;
}

void suffix_expand(SuffixPool *pool, SuffixTrie *t, uint32_t node) {
    if (!t->node[node].lazy || t->is_full) return;
    const uint32_t sequence = t->node[node].head, position = t->node[node].total;
    SuffixText *s = &t->text[sequence];
    if (position >= s->length) return; /* that sequence still stands here: it will go on itself */
    const uint32_t suffix = t->node[node].suffix;
    suffix_expand(pool, t, suffix);
    SuffixNode *n = &t->node[node];
    n->lazy = 0, n->head = 0, n->total = 0;
    const uint32_t below = suffix_find(t, suffix, s->text[position]);
    if (!below) return;
    const uint32_t child = add_child(pool, t, node, s->text[position], below, sequence, position + 1);
    /* The sequence may stand on the new node, as it did on the next shorter one. */
    if (child && position + 1 == s->length && t->node[child].depth <= pool->depth) s->at = child;
}

/* Makes `node` ready for a continuation other than the remembered one. */
static void open_node(SuffixPool *pool, SuffixTrie *t, uint32_t node) {
    suffix_expand(pool, t, node);
    if (!t->node[node].lazy || t->is_full) return;
    SuffixNode *n = &t->node[node];
    n->lazy = 0, n->head = 0, n->total = 0;
}

/* Counts `token` behind every context of the sequence, from the shortest (so that suffix links exist), and moves on. */
static void advance(SuffixPool *pool, SuffixTrie *t, uint32_t sequence, int32_t token) {
    uint32_t chain[SUFFIX_MAX_DEPTH + 1], below = 0;
    int links = 0;
    const SuffixText s = t->text[sequence];
    for (uint32_t v = s.at; v; v = t->node[v].suffix) chain[links++] = v;
    chain[links++] = 0;
    while (links--) {
        const uint32_t v = chain[links];
        if (t->node[v].lazy) {
            /* Here for the first time, so the longer contexts are new too: they stay as they are. */
            if (t->node[v].head == sequence && t->node[v].total == s.length) break;
            open_node(pool, t, v);
            if (t->node[v].lazy) break;
        }
        uint32_t child = suffix_find(t, v, token);
        if (child) count(t, child);
        else if (v && !below) break;
        else child = add_child(pool, t, v, token, below, sequence, s.length + 1);
        if (!child) break;
        below = child;
    }
    if (t->node[below].depth > pool->depth) below = t->node[below].suffix;
    t->text[sequence].at = below;
}

/* Appends tokens to a sequence. Without memory for the text it ends here: later tokens are not taken either. */
static int append(SuffixPool *pool, SuffixTrie *t, uint32_t sequence, const int32_t *tokens, int64_t n) {
    SuffixText *s = &t->text[sequence];
    if (s->has_ended) return SUFFIX_NO_MEMORY;
    if (s->length + n > s->capacity) {
        int64_t capacity = s->capacity ? s->capacity : 64;
        while (capacity < s->length + n) capacity *= 2;
        int32_t *text = capacity > INT32_MAX ? NULL : resize(pool, s->text, 4 * (int64_t)s->capacity, 4 * capacity);
        if (!text) {
            s->has_ended = 1, s->at = 0;
            return SUFFIX_NO_MEMORY;
        }
        s->text = text, s->capacity = (uint32_t)capacity;
    }
    for (int64_t i = 0; i < n; i++) {
        advance(pool, t, sequence, tokens[i]);
        s->text[s->length++] = tokens[i];
    }
    return SUFFIX_OK;
}

SuffixPool *tlt_suffix_new(int32_t depth, int32_t vocab, int64_t max_bytes) {
    SuffixPool *pool = calloc(1, sizeof *pool);
    if (pool) pool->depth = depth, pool->vocab = vocab, pool->max_bytes = max_bytes;
    return pool;
}

static int64_t trie_bytes(const SuffixTrie *t) {
    int64_t bytes = t->node_capacity * (int64_t)sizeof *t->node + 4 * (int64_t)t->table_size;
    for (uint32_t i = 0; i < t->texts; i++) bytes += 4 * (int64_t)t->text[i].capacity;
    return bytes + t->text_capacity * (int64_t)sizeof *t->text + (int64_t)sizeof *t;
}

static void free_trie(SuffixPool *pool, SuffixTrie *t) {
    pool->bytes -= trie_bytes(t);
    for (uint32_t i = 0; i < t->texts; i++) free(t->text[i].text);
    free(t->node), free(t->table), free(t->text), free(t);
}

/* Drops all tries. */
void tlt_suffix_clear(SuffixPool *pool) {
    while (pool->tries) free_trie(pool, pool->trie[--pool->tries]);
}

void tlt_suffix_free(SuffixPool *pool) {
    if (!pool) return;
    tlt_suffix_clear(pool);
    free(pool->trie);
    free(pool);
}

static SuffixTrie *new_trie(SuffixPool *pool) {
    SuffixTrie *t = resize(pool, NULL, 0, (int64_t)sizeof *t);
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    if (!reserve(pool, t)) {
        free_trie(pool, t);
        return NULL;
    }
    t->node[0] = (SuffixNode){0};
    t->nodes = 1;
    return t;
}

/* A new trie's number, or SUFFIX_NO_MEMORY. */
int32_t tlt_suffix_trie(SuffixPool *pool) {
    if (pool->tries == pool->trie_capacity) {
        int32_t capacity = pool->trie_capacity ? 2 * pool->trie_capacity : 16;
        SuffixTrie **grown = realloc(pool->trie, (size_t)capacity * sizeof *grown);
        if (!grown) return SUFFIX_NO_MEMORY;
        pool->trie = grown, pool->trie_capacity = capacity;
    }
    SuffixTrie *t = new_trie(pool);
    if (!t) return SUFFIX_NO_MEMORY;
    pool->trie[pool->tries] = t;
    return pool->tries++;
}

static SuffixTrie *get(const SuffixPool *pool, int32_t trie) {
    return trie >= 0 && trie < pool->tries ? pool->trie[trie] : NULL;
}

/* Makes nodes of all contexts at the end of a sequence, so that sequences which go on from there share them. */
static void materialise_end(SuffixPool *pool, SuffixTrie *t, uint32_t sequence) {
    const SuffixText *s = &t->text[sequence];
    const uint32_t longest = s->length < (uint32_t)pool->depth ? s->length : (uint32_t)pool->depth;
    for (uint32_t n = t->node[s->at].depth + 1u; n <= longest; n++) {
        uint32_t v = 0;
        for (uint32_t i = s->length - n; i < s->length; i++) {
            suffix_expand(pool, t, v);
            v = suffix_find(t, v, s->text[i]);
            if (!v) return;
        }
        t->text[sequence].at = v;
    }
}

static int32_t add_text(SuffixPool *pool, SuffixTrie *t, int32_t after) {
    if (t->texts == t->text_capacity) {
        const int64_t have = t->text_capacity, want = have ? 2 * have : 8, size = sizeof *t->text;
        SuffixText *grown = want > INT32_MAX ? NULL : resize(pool, t->text, have * size, want * size);
        if (!grown) return SUFFIX_NO_MEMORY;
        t->text = grown, t->text_capacity = (uint32_t)want;
    }
    if (after >= 0) materialise_end(pool, t, (uint32_t)after);
    t->text[t->texts] = (SuffixText){.at = after < 0 ? 0 : t->text[after].at};
    return (int32_t)t->texts++;
}

/* A new sequence of a trie. It goes on where sequence `after` stands now (-1: from nothing). Returns its number, or a
 * negative error. */
int32_t tlt_suffix_sequence(SuffixPool *pool, int32_t trie, int32_t after) {
    SuffixTrie *t = get(pool, trie);
    return t && after < (int32_t)t->texts ? add_text(pool, t, after) : SUFFIX_BAD_HANDLE;
}

static int are_tokens(const SuffixPool *pool, const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= pool->vocab) return 0;
    return 1;
}

/* Appends n tokens to a sequence; nothing is changed if one is outside the vocabulary. */
int tlt_suffix_append(SuffixPool *pool, int32_t trie, int32_t sequence, const int32_t *tokens, int64_t n) {
    SuffixTrie *t = get(pool, trie);
    if (!t || sequence < 0 || sequence >= (int32_t)t->texts) return SUFFIX_BAD_HANDLE;
    if (!are_tokens(pool, tokens, n)) return SUFFIX_BAD_TOKEN;
    return append(pool, t, (uint32_t)sequence, tokens, n);
}

/* Appends what the rows have drawn since `num_read`, and moves that up. Nothing is changed if a token is outside the
 * vocabulary. Without memory tokens are left out, which costs matches only. */
int tlt_suffix_follow(SuffixPool *pool, const SuffixRows *q) {
    for (int32_t r = 0; r < q->rows; r++) {
        const int64_t s = q->slots[r], from = q->num_read[s];
        if (from < 0 || q->output_len[r] < from || q->output_len[r] > q->width) return SUFFIX_BAD_HANDLE;
        if (!are_tokens(pool, q->outputs + s * q->width + from, q->output_len[r] - from)) return SUFFIX_BAD_TOKEN;
    }
    for (int32_t r = 0; r < q->rows; r++) {
        const int64_t s = q->slots[r], from = q->num_read[s];
        SuffixTrie *t = get(pool, q->handles[2 * s]);
        const int32_t sequence = q->handles[2 * s + 1];
        if (t && sequence >= 0)
            append(pool, t, (uint32_t)sequence, q->outputs + s * q->width + from, q->output_len[r] - from);
        q->num_read[s] = q->output_len[r];
    }
    return SUFFIX_OK;
}

/* Tokens of a sequence; -1: no such sequence. */
int64_t tlt_suffix_length(const SuffixPool *pool, int32_t trie, int32_t sequence) {
    const SuffixTrie *t = get(pool, trie);
    return t && sequence >= 0 && sequence < (int32_t)t->texts ? (int64_t)t->text[sequence].length : -1;
}
