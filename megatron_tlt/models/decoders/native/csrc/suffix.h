/* Depth-limited suffix tries over token sequences: the continuations of each context, with counts.
 *
 * A node is a string of at most depth + 1 tokens; its count is the number of its occurrences, its suffix link the node
 * without the first token. A string is a node once the string without its last token was seen twice: until then its
 * parent only remembers where it was seen (`lazy`), which keeps text that never repeats at about one node a token. A
 * sequence stands on the longest suffix of its text that is a node; this node and those along its suffix links are its
 * contexts, so nothing is searched when it goes on.
 *
 * Node 0 is the root (the empty string) and stands for "none" wherever a child or a neighbour is named.
 */
#ifndef TLT_SUFFIX_H
#define TLT_SUFFIX_H

#include <stddef.h>
#include <stdint.h>

#define SUFFIX_MAX_DEPTH 64
#define SUFFIX_MAX_LENGTH 32 /* tokens drafted in a row */
/* The table of match rates: by share, longest context and candidates. */
#define SUFFIX_ODDS 8  /* log odds of the share, one wide, from -2 on */
#define SUFFIX_STEPS 5 /* of the context's length and of the number of candidates */
#define SUFFIX_FEATURES (SUFFIX_ODDS * SUFFIX_STEPS * SUFFIX_STEPS)

enum { SUFFIX_OK = 0, SUFFIX_BAD_TOKEN = -1, SUFFIX_BAD_HANDLE = -2, SUFFIX_NO_MEMORY = -3 };

typedef struct {
    uint32_t parent, suffix;
    uint32_t next, prev;    /* siblings, most frequent first (roughly: a child moves up one place at a time) */
    uint32_t head, total;   /* first child, and the children's counts summed; while lazy: sequence and position */
    uint32_t count, fan;    /* occurrences; children */
    int32_t token;          /* last token of the string */
    uint8_t depth, lazy;
} SuffixNode;

typedef struct {
    int32_t *text;
    uint32_t length, capacity;
    uint32_t at;   /* longest suffix that is a node, at most `depth` long */
    int has_ended; /* memory ran out: no token is added any more */
} SuffixText;

typedef struct {
    SuffixNode *node;
    uint32_t *table; /* open addressing: (parent, token) -> child */
    SuffixText *text;
    uint32_t nodes, node_capacity, table_size, texts, text_capacity;
    int is_full; /* memory ran out: no node is added any more */
} SuffixTrie;

typedef struct {
    SuffixTrie **trie;
    int32_t tries, trie_capacity;
    int32_t depth, vocab;
    int64_t bytes, max_bytes;
} SuffixPool;

/* The running rows and where their drafts are written. Row r has slot slots[r]. */
typedef struct {
    const int32_t *slots;      /* [rows] */
    const int32_t *handles;    /* [slots][2] trie and sequence; -1: none */
    const int32_t *outputs;    /* [slots][width] tokens drawn */
    int32_t *num_read;         /* [slots] of these, how many are in the trie */
    const int32_t *output_len; /* [rows] tokens drawn: the output position of the first drafted one */
    const uint64_t *keys;      /* [rows] request keys */
    const float *temperature;  /* [rows] 0: no noise */
    const int32_t *lengths;    /* [rows] longest draft of each */
    const float *rates;        /* [SUFFIX_FEATURES] probability that a token of this kind is the policy's */
    int32_t *counts;           /* [rows] */
    int32_t *tokens, *feature; /* of all drafted tokens, row after row */
    float *cumulative_acceptance;
    int32_t rows, width;
    float min_cumulative_acceptance;
} SuffixRows;

/* The child of `node` by `token`, or 0. A lazy node has none. */
static inline uint32_t suffix_find(const SuffixTrie *t, uint32_t node, int32_t token) {
    const uint32_t mask = t->table_size - 1;
    if (t->node[node].lazy) return 0;
    const uint32_t head = t->node[node].head;
    if (!head || t->node[head].token == token) return head;
    uint64_t key = ((uint64_t)node << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    for (uint32_t i = (uint32_t)(key >> 32) & mask; t->table[i]; i = (i + 1) & mask) {
        const SuffixNode *child = &t->node[t->table[i]];
        if (child->token == token && child->parent == node) return t->table[i];
    }
    return 0;
}

/* Gives a lazy node the child that its one remembered occurrence had, if that went on. */
void suffix_expand(SuffixPool *pool, SuffixTrie *t, uint32_t node);

#endif
