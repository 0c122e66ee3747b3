/* Shared by Python and C: the model, one step, and the functions called through ctypes.
 *
 * Legend: T rows (tokens) of a step, S sequences, R rows whose logits are wanted, H hidden size,
 * D head size, Dp D rounded up to 16, I intermediate size, V vocabulary, L layers, W = (aux_count + 1) * H: the state
 * of a row is the residual stream behind each of the layers `aux`, then the hidden state after the final norm; E experts,
 * F their width, k chosen by a row.
 * Under tensor parallelism heads, I and F are this rank's part; embedding, LM head and routers are whole.
 * Memory that outlives a call is allocated by Python (torch tensors); C keeps no pointer after a call.
 * The field order is repeated in abi.py.
 */
#ifndef TLT_H
#define TLT_H

#include <stdint.h>

#ifdef TLT_BF16
typedef uint16_t num; /* bf16 */
#else
typedef float num;
#endif

#define TLT_MAX_HEAD_DIM 256
#define TLT_MAX_THREADS 256
#define TLT_MAX_AUX 16

typedef struct {
    const num *qkv, *o, *gate_up, *down; /* packed panels, see gemm.c */
    const float *qkv_bias;                 /* padded to panels, or NULL */
    const float *input_norm, *post_norm;   /* [Hp] zero-padded; input_norm NULL: none */
    const float *q_norm, *k_norm;          /* [D] or NULL */
    /* A layer with experts; else NULL. `gate_up` and `down` are then those of the expert that all rows share. */
    const num *router;                       /* packed panels of E columns; with a shared expert one more, its gate */
    const num *expert_gate_up, *expert_down; /* E packed weights, one after the other */
    int64_t route;                             /* number of the layer among those with experts */
} TltLayer;

typedef struct {
    int32_t hidden, layers, heads, kv_heads, head_dim, inter, vocab;
    int32_t max_rows, rope_len, tp;
    int32_t aux_count, aux[TLT_MAX_AUX]; /* ascending, never the last layer */
    int32_t experts, topk, expert_inter, shared_inter; /* E, k, F, the shared expert's width or 0; E 0: none */
    int32_t renormalise, route_bytes; /* whether a row's gates sum to 1; bytes of its routed_experts over all layers */
    float eps;
    int64_t reduced;         /* all-reduces that are done, by TltAllReduce */
    const float *rope;       /* [rope_len][D]: D/2 cosines, then D/2 sines */
    const num *embed;        /* [V][H] row-major */
    const num *head;         /* packed panels */
    const float *final_norm; /* [Hp] or NULL: none */
    const TltLayer *layer;   /* [L] */
    /* Buffers of max_rows rows; row lengths are padded to a multiple of 64 numbers. */
    float *resid, *part, *qkv_out;
    num *x, *q, *att, *mid; /* inputs of matrix products */
    int32_t *units;          /* [max_rows][3]: first row, rows, sequence */
    /* Of layers with experts, see experts.c; N = max_rows * k pairs of a row and an expert. */
    float *scores, *gates, *shared; /* [max_rows][E + 1 padded], [max_rows][k + 1], [max_rows][Hp] */
    num *pair_x, *pair_mid; /* [N][Hp], [N][F padded] */
    float *pair_out;        /* [N][Hp] */
    int32_t *chosen, *place;        /* [N]: expert of a pair, and where it stands once sorted by expert */
    int32_t *starts, *active;       /* [E + 1], [E]: where an expert's pairs begin; the experts that have some */
} TltModel;

typedef struct {
    int32_t tokens, seqs, logits_rows, max_blocks, num_blocks, block_size;
    const int32_t *token_ids, *positions, *slots, *query_start, *block_tables;
    const int32_t *logit_rows; /* [R] ascending */
    num *kv;       /* [L][2][num_blocks][kv_heads][block_size / 16] tiles of 16 * Dp elements */
    float *logits; /* [R][V] */
    num *hidden;   /* [T][W] states, or NULL */
    void *routed_experts;     /* [T][layers with experts][k] experts of each row, uint8 if E <= 256 else int16; or NULL */
} TltStep;

/* Sums buf[count] over the tensor-parallel ranks in place, and then counts it in the model's `reduced`. It returns nothing: an
 * exception at the entry of Python's function would leave the result of the call undefined. */
typedef void (*TltAllReduce)(float *buf, int64_t count);

enum {
    TLT_OK = 0,
    TLT_BAD_TOKEN = 1,
    TLT_BAD_POSITION = 2,
    TLT_BAD_SLOT = 3,
    TLT_BAD_BLOCK = 4,
    TLT_BAD_ROW = 5,
    TLT_BAD_SHAPE = 6,
    TLT_REDUCE_FAILED = 7,
    TLT_NO_MEMORY = 8
};

int tlt_prepare(void); /* once in a process; not 0: the system refuses the processor's tiles */
const char *tlt_form(void); /* instructions of the products */
int tlt_panel_width(void);
int tlt_cell_numbers(void); /* numbers that one step over K takes of a column: a packed weight is [N / panel][K / these][panel][these] */
int tlt_row_multiple(void); /* K of a packed weight is rounded up to it */
int tlt_forward(const TltModel *model, const TltStep *step, int threads, TltAllReduce all_reduce);
int tlt_keyed_sample(const float *logits, int64_t rows, int64_t vocab, int64_t stride, const float *temperature,
                     const uint64_t *keys, int32_t *token, float *logprob, int threads);

#endif
