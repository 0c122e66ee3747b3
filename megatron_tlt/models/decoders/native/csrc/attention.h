/* Attention of a few query rows of one sequence over the paged KV cache. */
#ifndef TLT_ATTENTION_H
#define TLT_ATTENTION_H

#include "numbers.h"

typedef struct {
    long heads, kv_heads, head_dim, padded_dim; /* padded_dim: head_dim up to a multiple of 16 */
    long num_blocks, block_size;
    const num *k_plane, *v_plane;   /* this layer's [num_blocks][kv_heads][block_size/16] tiles */
    const num *q;                   /* [row][heads][padded_dim] */
    num *out;                       /* [row][out_stride], head after head, unpadded */
    long out_stride;
} Attention;

/* Elements of one tile: 16 positions x padded_dim. */
INLINE long tile_size(long padded_dim) { return TILE * padded_dim; }

/* The tile that holds `slot` (block * block_size + offset) for a kv head, counted in tiles of the plane. */
INLINE long tile_index(long kv_heads, long block_size, long head, long block, long tile_in_block) {
    return (block * kv_heads + head) * (block_size / TILE) + tile_in_block;
}

/* The keys that the rows of one call see. */
typedef struct {
    const int32_t *positions;   /* of the rows */
    const int32_t *block_table; /* of the sequence */
    long first_visible;         /* lower positions are neither read nor counted */
} Span;

/* Rows [row, row + rows), all of one sequence, for kv head `head` and its query heads. */
void tlt_attend(const Attention *a, long row, long rows, long head, const Span *span);

/* Writes one head of one row into the cache; key and value are float [padded_dim], zero-padded. */
void tlt_store_key(num *tile, long lane, long padded_dim, const float *key);
void tlt_store_value(num *tile, long lane, long padded_dim, const float *value);

#endif
