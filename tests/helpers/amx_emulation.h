/* AMX's tile instructions in plain C, as Intel's manual describes them, for tests on machines without. */
static _Thread_local struct {
    uint16_t bytes[8];
    uint8_t rows[8];
    union {
        uint8_t raw[64];
        float sum[16];
        uint16_t number[32];
    } row[8][16];
} TILES;

INLINE void _tile_loadconfig(const void *config) {
    memcpy(TILES.bytes, (const char *)config + 16, sizeof TILES.bytes);
    memcpy(TILES.rows, (const char *)config + 48, sizeof TILES.rows);
    memset(TILES.row, 0, sizeof TILES.row);
}

INLINE void _tile_release(void) { memset(&TILES, 0, sizeof TILES); }

INLINE void _tile_zero(int tile) { memset(TILES.row[tile], 0, sizeof TILES.row[tile]); }

INLINE void _tile_loadd(int tile, const void *from, long stride) {
    for (long r = 0; r < TILES.rows[tile]; r++)
        memcpy(TILES.row[tile][r].raw, (const char *)from + r * stride, TILES.bytes[tile]);
}

INLINE void _tile_stored(int tile, void *to, long stride) {
    for (long r = 0; r < TILES.rows[tile]; r++)
        memcpy((char *)to + r * stride, TILES.row[tile][r].raw, TILES.bytes[tile]);
}

/* A number as the product takes and leaves it: a denormal one is a zero of its sign. */
INLINE float emulated_flush(float x) {
    return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x;
}

INLINE float emulated_float(uint16_t number) {
    const uint32_t bits = (uint32_t)number << 16;
    float x;
    memcpy(&x, &bits, 4);
    return emulated_flush(x);
}

/* c += a * b: even and odd products are summed apart over the tile's cells, each rounded once with its sum, and then
   together. */
INLINE void _tile_dpbf16ps(int c, int a, int b) {
    for (int m = 0; m < TILES.rows[c]; m++)
        for (int n = 0; n < TILES.bytes[c] / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < TILES.bytes[a] / 4; k++) {
                const uint16_t *row = TILES.row[a][m].number + 2 * k, *column = TILES.row[b][k].number + 2 * n;
                even = emulated_flush(__builtin_fmaf(emulated_float(row[0]), emulated_float(column[0]), even));
                odd = emulated_flush(__builtin_fmaf(emulated_float(row[1]), emulated_float(column[1]), odd));
            }
            float *sum = &TILES.row[c][m].sum[n];
            *sum = emulated_flush(emulated_flush(*sum) + emulated_flush(even + odd));
        }
}
