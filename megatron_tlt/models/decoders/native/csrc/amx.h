/* Products of bf16 on AMX tiles. */
#ifndef TLT_AMX_H
#define TLT_AMX_H

#include "numbers.h"

/* __AMXBF16__ is the name of clang 14. */
#if defined(TLT_BF16) && VW == 16 && (defined(__AMX_BF16__) || defined(__AMXBF16__) || defined(TLT_EMULATE))
#define TLT_AMX 1
#else
#define TLT_AMX 0
#endif

#if TLT_AMX
#ifdef TLT_EMULATE
#include TLT_EMULATE
#endif

#define TILE_ROWS 16
#define TILE_CELLS 16 /* a row of a tile is 64 bytes */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) TileConfig;

static __thread long tile_rows; /* what the tiles are configured for, 0: nothing */

/* Tiles 0 to 3: sums of the first rows, then of the others, times 2 x 16 columns; 4 and 5: rows; 6 and 7: weights. Waits for
 * the tiles in use, so it is done once for all products of so many rows. */
INLINE void configure_tiles(long rows) {
    if (rows == tile_rows) return;
    const long first = rows < TILE_ROWS ? rows : TILE_ROWS, others = rows - first;
    TileConfig c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = 64;
        c.rows[i] = (uint8_t)(i > 5 ? TILE_CELLS : i == 2 || i == 3 || i == 5 ? (others ? others : 1) : first);
    }
    __asm__ volatile("" : : "r"(&c) : "memory"); /* GCC 12 takes all but the first 8 bytes for unread, and leaves them out */
    _tile_loadconfig(&c);
    tile_rows = rows;
}

/* Or every switch of threads would save the tiles. */
INLINE void release_tiles(void) {
    _tile_release();
    tile_rows = 0;
}

/* sums[rows][NR] = rows of `a` times one panel of `steps` cells, a multiple of TILE_CELLS; the tiles are configured for
 * `rows`. `ahead`: cells to prefetch, 0: none. Strides in elements. */
static void tile_product(const cell *a, long a_stride, long rows, const cell *w, long steps, long ahead, float *sums,
                         long sums_stride) {
    const long others = rows - TILE_ROWS, panel_row = NR * (long)sizeof(cell);
    const long a_row = a_stride * (long)sizeof(cell), sums_row = sums_stride * (long)sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < steps; k += TILE_CELLS, w += TILE_CELLS * NR) {
        for (long i = 0; ahead && i < TILE_CELLS * NR; i += 16) __builtin_prefetch(w + ahead + i, 0, 2);
        _tile_loadd(6, w, panel_row);
        _tile_loadd(7, w + 16, panel_row);
        _tile_loadd(4, a + k, a_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (others <= 0) continue;
        _tile_loadd(5, a + TILE_ROWS * a_stride + k, a_row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sums_row);
    _tile_stored(1, sums + 16, sums_row);
    if (others <= 0) return;
    _tile_stored(2, sums + TILE_ROWS * sums_stride, sums_row);
    _tile_stored(3, sums + TILE_ROWS * sums_stride + 16, sums_row);
}
#endif

#endif
