/* Weights into panels, and copies of KV blocks. */
#include "pool.h"
#include "simd.h"
#include "tlt.h"

typedef struct {
    char *dst;
    const char *src;
    int src_bf16, dst_bf16;
    int64_t rows, cols, ld, first, panel_step, panel_offset;
} Pack;

INLINE float read_value(const Pack *p, int64_t row, int64_t col) {
    if (p->src_bf16) return bf16_to_f32(((const uint16_t *)p->src)[row * p->ld + col]);
    return ((const float *)p->src)[row * p->ld + col];
}

INLINE uint16_t read_bf16(const Pack *p, int64_t row, int64_t col) {
    if (p->src_bf16) return ((const uint16_t *)p->src)[row * p->ld + col];
    return f32_to_bf16(((const float *)p->src)[row * p->ld + col]);
}

/* Columns [from, to) of one panel; source row of panel column c is `row0 + c`. */
static void pack_panel(const Pack *p, char *panel, int64_t row0, int64_t from, int64_t to) {
    if (!p->dst_bf16) {
        float *out = (float *)panel;
        for (int64_t k = 0; k < p->cols; k++)
            for (int64_t c = from; c < to; c++) out[k * NR + c] = read_value(p, row0 + c, k);
        return;
    }
    uint32_t *out = (uint32_t *)panel;
    for (int64_t k = 0; k < p->cols; k += 2)
        for (int64_t c = from; c < to; c++) {
            uint32_t high = k + 1 < p->cols ? read_bf16(p, row0 + c, k + 1) : 0;
            out[k / 2 * NR + c] = read_bf16(p, row0 + c, k) | high << 16;
        }
}

/* Unit = one panel of those that the source rows touch. */
static void pack_unit(void *arg, long unit) {
    const Pack *p = arg;
    int64_t panel_bytes = (p->dst_bf16 ? (p->cols + 1) / 2 : p->cols) * NR * 4;
    int64_t index = p->first / NR + unit, start = index * NR; /* output column of the panel's column 0 */
    int64_t from = p->first > start ? p->first - start : 0;
    int64_t to = p->first + p->rows - start < NR ? p->first + p->rows - start : NR;
    pack_panel(p, p->dst + (index * p->panel_step + p->panel_offset) * panel_bytes, start - p->first, from, to);
}

/* Writes src[rows][cols] (row length `ld`) as output columns first .. first+rows of a packed weight. Panel i of
 * this weight is stored as panel i * panel_step + panel_offset (gate and up are interleaved with step 2). */
void tlt_pack(void *dst, const void *src, int src_bf16, int dst_bf16, int64_t rows, int64_t cols, int64_t ld,
              int64_t first, int64_t panel_step, int64_t panel_offset, int threads) {
    Pack p = {dst, src, src_bf16, dst_bf16, rows, cols, ld, first, panel_step, panel_offset};
    if (rows <= 0) return;
    tlt_team_open(threads);
    tlt_parallel((first + rows - 1) / NR - first / NR + 1, pack_unit, &p);
    tlt_team_close();
}

/* kv holds `planes` planes of num_blocks blocks; copies block src[i] to dst[i] in each, in order. */
void tlt_copy_blocks(void *kv, int64_t planes, int64_t num_blocks, int64_t block_bytes, const int32_t *src,
                     const int32_t *dst, int64_t count) {
    for (int64_t plane = 0; plane < planes; plane++) {
        char *base = (char *)kv + plane * num_blocks * block_bytes;
        for (int64_t i = 0; i < count; i++)
            memmove(base + dst[i] * block_bytes, base + src[i] * block_bytes, (size_t)block_bytes);
    }
}
