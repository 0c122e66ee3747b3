/* One forward in progress, and the stages that the policy (decoder.c) and its drafter (eagle.c) share. */
#ifndef TLT_DECODER_H
#define TLT_DECODER_H

#include "gemm.h"
#include "pool.h"

typedef struct {
    const TltModel *m;
    const TltStep *s;
    TltAllReduce all_reduce;
    int failed, threads;
    long hp, dp, qkv_n, qkv_stride, q_stride, att_n, att_stride; /* row lengths, elements */
    const num *in;                /* input of queries, keys and values; x by default */
    long in_stride, in_width;     /* elements */
    long first, rows;             /* this chunk */
    long units;                   /* of attention, see tlt_plan_chunk */
    long wanted;                  /* wanted rows of earlier chunks */
    long layer, aux;              /* the current layer; number of the auxiliary layer that is exported */
    const float *norm;            /* weight of the coming norm, or NULL */
    const int32_t *first_visible; /* [S] lowest position that a sequence sees, or NULL: all */
} Run;

/* W, elements of a row's state. */
INLINE long state_width(const TltModel *m) { return (m->aux_count + 1L) * m->hidden; }

INLINE long pad64(long n) { return (n + 63) / 64 * 64; }

/* A step's shape, and token, position and slot of each row: what the policy and its drafter have in common. */
int tlt_check_rows(const TltModel *m, const TltStep *s, int32_t vocab);

/* Everything of a step of the policy that could make C read or write outside its memory. See step.c. */
int tlt_check_step(const TltModel *m, const TltStep *s);

/* Cuts the chunk into attention units: up to MR / (query heads per kv head) rows of one sequence. */
void tlt_plan_chunk(Run *r);

void tlt_run_setup(Run *r, const TltModel *m, const TltStep *s, int threads, TltAllReduce all_reduce);

/* Norm of `hidden` values, zero-padded as `weight` is, padding included: to `out`, and in fp32 to `wide` if it is there. */
void tlt_rms_norm(const Run *r, const float *x, const float *weight, num *out, float *wide);

/* x = norm(residual stream) of one row; without weight the stream itself. */
void tlt_norm_row(Run *r, long row, const float *weight);

/* One layer over the chunk: from x (its input norm is done) to the residual stream and the next layer's x. */
void tlt_run_layer(Run *r, long index);

/* The experts of the current layer, from x: to the residual stream, under tensor parallelism to `part`. experts.c */
void tlt_run_experts(Run *r);

/* The beginning of a layer: the chunk's keys and values, from x, into the cache. */
void tlt_run_keys(Run *r, long index);

/* Last norm and LM head of the chunk's wanted rows; states of all rows if step->hidden is there. */
void tlt_run_head(Run *r);

/* The dense MLP of width `inter`, from x to `out` [rows][Hp] by the epilogue of its last product. */
void tlt_run_mlp(Run *r, long inter, int epilogue, float *out);

/* out[rows][N] = x[rows][K] * w^T on this chunk's rows. */
void tlt_linear(Run *r, const num *a, long a_stride, long k, const num *w, long n, int epilogue, const float *bias,
                void *out, long out_stride);

#endif
