/* FlashMoE: mixture of experts. Included by flashmoe.h, whose rules hold here too; include that.
 *
 * A layer of E experts over T tokens of which each takes K experts:
 *
 *   flashmoe_moe_route      logits [T, E] -> which experts, with what weights, in what order
 *   flashmoe_moe_forward    x [T, H], that, and the experts' weights -> out [T, H]
 *   flashmoe_fused_moe      x and a router's weights, or logits -> out: all of it
 *   flashmoe_grouped_product   the products alone (grouped GEMM), for rows that are sorted already
 *
 * and the gradients of three of them: flashmoe_moe_backward, flashmoe_moe_route_backward and
 * flashmoe_grouped_product_backward. flashmoe_fused_moe's are those of its three parts.
 *
 * Words: a *pair* is one token with one of its experts, numbered t * K + k. A *slot* is a place in
 * the order by expert: the pairs of expert 0 first, then those of expert 1, and so on; within an
 * expert by their number.
 */
#ifndef FLASHMOE_MOE_H_
#define FLASHMOE_MOE_H_

#include "flashmoe/flashmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * Routing
 *
 * From logits: `choice` orders the experts of a token, the K greatest win, `score` gives weights.
 *
 *   SOFTMAX        choice = logits             score = softmax of all E logits
 *   TOPK_SOFTMAX   choice = logits             score = softmax of the K chosen logits
 *   SIGMOID        choice = logits, or with a selection_bias sigmoid(logits) + selection_bias
 *                                              score = sigmoid(logits)
 *
 *   weight = score, with `renormalize` divided by the sum of the token's K scores (if that is not
 *   0), then times `scale`.
 *
 * With num_groups > 1 (SIGMOID only) experts come in groups of E / num_groups neighbours; a group
 * counts as the sum of its two greatest sigmoid(logits) + selection_bias, and only experts of the
 * top_groups greatest groups are chosen from (DeepSeek-V3, arXiv:2412.19437).
 *
 * Equal choices go to the lower expert (group). A NaN is chosen last, as a -inf is; the K experts
 * of a token are distinct whatever the logits are. Scores are computed in fp32, on the CPU those of
 * fp64 logits and weights in fp64, and a NaN or Inf goes into them where IEEE arithmetic takes it.
 *
 * Instead of logits the choice itself may be given: given_ids, of which a negative one or one that
 * is not below E - with an expert_map: below its length, and mapped so - is no expert of this call
 * ("not mine"): its pair has no slot, id -1, and weight 0. The scores are given_weights then; a sum
 * to renormalize by is that of all K, not mine included.
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_moe_scoring {
  FLASHMOE_MOE_SOFTMAX = 0,
  FLASHMOE_MOE_TOPK_SOFTMAX = 1,
  FLASHMOE_MOE_SIGMOID = 2
} flashmoe_moe_scoring;

/* T >= 0, 1 <= E <= 1024, 1 <= K <= min(E, 32) (given ids: K <= 32), T * K <= 2^31 - 2^16.
 * Every tensor is contiguous but logits and given ones, whose last stride is 1. */
typedef struct flashmoe_moe_route_params {
  size_t struct_size;
  const flashmoe_tensor* logits;         /* [T, E] fp16, bf16, fp32, on the CPU fp64; NULL
                                            with given_ids */
  const flashmoe_tensor* selection_bias; /* [E] fp32, with fp64 logits also fp64; NULL: none */
  const flashmoe_tensor* given_ids;      /* [T, K] int32, int64; NULL with logits */
  const flashmoe_tensor* given_weights;  /* [T, K] dtypes as of logits; NULL: all 1 */
  const flashmoe_tensor* expert_map;     /* [any] int32, id -> expert of this call; NULL: as is */
  const flashmoe_tensor* ids;            /* out [T, K] int32: experts, greatest choice first */
  const flashmoe_tensor* weights;        /* out [T, K] fp32, of fp64 logits or given weights
                                            fp64 */
  const flashmoe_tensor* offsets;        /* out [E + 1] int32: expert e has the slots offsets[e] to
                                            offsets[e + 1] - 1 */
  const flashmoe_tensor* pairs;          /* out [T * K] int32: the pair of each slot; -1 at
                                            offsets[E] and behind */
  const flashmoe_tensor* slots;          /* out [T, K] int32: the slot of each pair, or -1 */
  const flashmoe_tensor* lse; /* out [T] dtype as of weights: log sum exp of the logits; NULL:
                                 not wanted */
  int32_t scoring;            /* flashmoe_moe_scoring; 0 with given_ids */
  int32_t renormalize;        /* 0 or 1 */
  int32_t num_groups;         /* 0 or 1: no groups; divides E, with 2 experts or more each */
  int32_t top_groups;         /* 1 to num_groups, with K experts or more; 0 without groups */
  float scale;                /* finite; 0 = 1 */
  uint32_t reserved;          /* 0 */
} flashmoe_moe_route_params;

static inline flashmoe_moe_route_params flashmoe_moe_route_params_init(void) {
  flashmoe_moe_route_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_moe_route would do; launches nothing, reads no tensor data. */
FLASHMOE_API flashmoe_status flashmoe_moe_route_plan(const flashmoe_moe_route_params* params,
                                                     flashmoe_plan* plan);
FLASHMOE_API flashmoe_status
flashmoe_moe_route_workspace_size(const flashmoe_moe_route_params* params, size_t* bytes);

/* Routes. workspace and stream as in flashmoe_attention_forward; a GPU's is 256-byte aligned.
 * At most two launches on a GPU.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL, CUDA. */
FLASHMOE_API flashmoe_status flashmoe_moe_route(const flashmoe_moe_route_params* params,
                                                void* workspace, size_t workspace_size,
                                                void* stream);

/* ------------------------------------------------------------------------------------------------
 * Layer, forward
 *
 *   out[t] = sum_k weights[t, k] * y(t, ids[t, k]),
 *   y(t, e) = w_down[e] a(t, e) + b_down[e]
 *   a(t, e) = act(g) * (u + up_offset)        g = w_gate[e] x[t] + b_gate[e],  u likewise; or
 *           = act(u)                          without a gate
 *   act     : SILU z * sigmoid(alpha * z), GELU z * Phi(z), GELU_TANH its approximation by tanh,
 *             RELU max(z, 0), RELU2 max(z, 0)^2
 *
 * With `limit` g is cut to at most limit, and u to -limit..limit, before that (gpt-oss: limit 7,
 * alpha 1.702, up_offset 1). With weight_on_input weights[t, k] multiplies x[t] instead of y.
 *
 *   x    [T, H]             fp16, bf16; on the CPU also fp32 and fp64
 *   out  [T, H]             same
 *   w_gate_up  [E, 2I, H]   same; order of its rows as `gate` says. SEPARATE: the gate, [E, I, H];
 *                           NO_GATE: what act is applied to, [E, I, H]
 *   w_up       [E, I, H]    same; SEPARATE only
 *   w_down     [E, H, I]    same
 *   b_...                   [E, rows of that matrix], fp32 or x's dtype, last stride 1; NULL: none
 *
 * H and I are multiples of 8. Of an expert's matrix either the last stride or the one before it is
 * 1: a weight stored as [E, H, 2I] is passed as its transposed view. Other strides, of x and out
 * too, are multiples of 16 bytes, as is where tensors begin; any stride from one expert to the
 * next. w_down may be transposed where w_gate_up is not, and the other way round; w_gate_up and
 * w_up, where they are two, are both transposed or neither, but for "cpu". "sm89_few_tokens" takes
 * no transposed weights. Products are accumulated in fp32, of fp64 in fp64; a and y are kept in x's
 * dtype, the sum over k is in the dtype of the products, in the order of k. The same inputs give
 * the same bits on every run. A token without experts gets 0. A NaN or Inf of a token, or of an
 * expert, reaches the tokens and experts that meet it and no others. weights, offsets, pairs and
 * slots are those of flashmoe_moe_route, for the same T and K; whatever they hold, nothing outside
 * the tensors is read or written.
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_moe_gate {
  FLASHMOE_MOE_GATE_UP = 0,     /* rows 0 .. I - 1 gate, I .. 2I - 1 up */
  FLASHMOE_MOE_UP_GATE = 1,     /* the other way round */
  FLASHMOE_MOE_INTERLEAVED = 2, /* row 2i gate, row 2i + 1 up */
  FLASHMOE_MOE_SEPARATE = 3,    /* two tensors */
  FLASHMOE_MOE_NO_GATE = 4
} flashmoe_moe_gate;

typedef enum flashmoe_activation {
  FLASHMOE_ACTIVATION_SILU = 0,
  FLASHMOE_ACTIVATION_GELU = 1,
  FLASHMOE_ACTIVATION_GELU_TANH = 2,
  FLASHMOE_ACTIVATION_RELU = 3,
  FLASHMOE_ACTIVATION_RELU2 = 4
} flashmoe_activation;

typedef struct flashmoe_moe_forward_params {
  size_t struct_size;
  const flashmoe_tensor* x;
  const flashmoe_tensor* w_gate_up;
  const flashmoe_tensor* w_up; /* NULL unless SEPARATE */
  const flashmoe_tensor* w_down;
  const flashmoe_tensor* b_gate_up;
  const flashmoe_tensor* b_up; /* NULL unless SEPARATE */
  const flashmoe_tensor* b_down;
  const flashmoe_tensor* weights; /* [T, K] fp32, with an x of fp64 also fp64 */
  const flashmoe_tensor* offsets; /* [E + 1] int32 */
  const flashmoe_tensor* pairs;   /* [T * K] int32 */
  const flashmoe_tensor* slots;   /* [T, K] int32 */
  const flashmoe_tensor* out;     /* [T, H] */
  /* Out [T * K, 2I] (g, then u), without a gate [T * K, I], x's dtype, last stride 1, by slot: what
   * act was applied to, before `limit`; rows without a pair are not written. NULL: not wanted */
  const flashmoe_tensor* pre_activation;
  int32_t gate;                   /* flashmoe_moe_gate */
  int32_t activation;             /* flashmoe_activation */
  float alpha;                    /* SILU only; finite; 0 = 1 */
  float limit;                    /* finite and positive; 0: none */
  float up_offset;                /* finite; 0 without a gate */
  int32_t weight_on_input;        /* 0 or 1 */
  const char* kernel;             /* NULL: the best here. Else a kernel family, as in attention */
  const flashmoe_tensor* x_scale; /* of tensors of 8 bits, which this version does not take: NULL */
  const flashmoe_tensor* w_gate_up_scale;
  const flashmoe_tensor* w_up_scale;
  const flashmoe_tensor* w_down_scale;
} flashmoe_moe_forward_params;

static inline flashmoe_moe_forward_params flashmoe_moe_forward_params_init(void) {
  flashmoe_moe_forward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

FLASHMOE_API flashmoe_status flashmoe_moe_forward_plan(const flashmoe_moe_forward_params* params,
                                                       flashmoe_plan* plan);
FLASHMOE_API flashmoe_status
flashmoe_moe_forward_workspace_size(const flashmoe_moe_forward_params* params, size_t* bytes);

/* Computes out. workspace, stream and errors as in flashmoe_moe_route. */
FLASHMOE_API flashmoe_status flashmoe_moe_forward(const flashmoe_moe_forward_params* params,
                                                  void* workspace, size_t workspace_size,
                                                  void* stream);

/* ------------------------------------------------------------------------------------------------
 * Grouped product
 *
 *   out[r] = w[e] x[r] + bias[e]     for every row r of every expert e
 *
 *   x    [rows, K] with offsets [E + 1]: expert e has rows offsets[e] to offsets[e + 1] - 1; or
 *        [E, M, K] with counts [E]: it has the first counts[e] of its M rows
 *   w    [E, N, K], strides as those of an expert's matrix above
 *   out  [rows, N] or [E, M, N]; rows that no expert has are not written
 * Offsets and counts are cut to the rows that there are, so that {0, 2^31 - 1} gives one expert
 * all. K and N are multiples of 8, rows and M at most 2^31 - 2^16; dtypes, alignment and
 * accumulation as above.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_grouped_product_params {
  size_t struct_size;
  const flashmoe_tensor* x;
  const flashmoe_tensor* w;
  const flashmoe_tensor* bias;    /* [E, N] fp32 or x's dtype; NULL: none */
  const flashmoe_tensor* offsets; /* [E + 1] int32, with a rank 2 x */
  const flashmoe_tensor* counts;  /* [E] int32, with a rank 3 x */
  const flashmoe_tensor* out;
  const char* kernel;
  const flashmoe_tensor* x_scale; /* of tensors of 8 bits, which this version does not take: NULL */
  const flashmoe_tensor* w_scale;
} flashmoe_grouped_product_params;

static inline flashmoe_grouped_product_params flashmoe_grouped_product_params_init(void) {
  flashmoe_grouped_product_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

FLASHMOE_API flashmoe_status
flashmoe_grouped_product_plan(const flashmoe_grouped_product_params* params, flashmoe_plan* plan);
FLASHMOE_API flashmoe_status flashmoe_grouped_product_workspace_size(
    const flashmoe_grouped_product_params* params, size_t* bytes);
FLASHMOE_API flashmoe_status flashmoe_grouped_product(const flashmoe_grouped_product_params* params,
                                                      void* workspace, size_t workspace_size,
                                                      void* stream);

/* ------------------------------------------------------------------------------------------------
 * Router, routing and layer in one call
 *
 *   logits = router_weights tokens[t] + router_bias, in the dtype of tokens, or given
 *   out    = flashmoe_moe_forward(tokens, flashmoe_moe_route(logits))
 *
 * with all that lies between in the workspace. The same bits as by three calls. Arguments are those
 * of the two, but for:
 *
 *   tokens          [T, H]  x of the layer
 *   router_weights  [E, H]  dtype of tokens, strides as those of an expert's matrix; E is
 *                           a multiple of 8 (of other E's give logits); NULL with logits
 *   router_bias     [E]     fp32 or the dtype of tokens; NULL: none, and with logits
 *   logits          [T, E]  fp16, bf16, fp32, beside tokens of fp64 also fp64; NULL with
 *                           router_weights
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_fused_moe_params {
  size_t struct_size;
  const flashmoe_tensor* tokens;
  const flashmoe_tensor* router_weights;
  const flashmoe_tensor* router_bias;
  const flashmoe_tensor* logits;
  const flashmoe_tensor* selection_bias;
  const flashmoe_tensor* w_gate_up;
  const flashmoe_tensor* w_up;
  const flashmoe_tensor* w_down;
  const flashmoe_tensor* b_gate_up;
  const flashmoe_tensor* b_up;
  const flashmoe_tensor* b_down;
  const flashmoe_tensor* out;
  int32_t top_k;       /* K */
  int32_t scoring;     /* flashmoe_moe_scoring */
  int32_t renormalize; /* 0 or 1 */
  int32_t num_groups;  /* as in flashmoe_moe_route */
  int32_t top_groups;
  float scale;        /* finite; 0 = 1 */
  int32_t gate;       /* flashmoe_moe_gate */
  int32_t activation; /* flashmoe_activation */
  float alpha;        /* as in flashmoe_moe_forward */
  float limit;
  float up_offset;
  int32_t weight_on_input; /* 0 or 1 */
  const char* kernel;      /* NULL: the best here. Else a kernel family of the layer */
} flashmoe_fused_moe_params;

static inline flashmoe_fused_moe_params flashmoe_fused_moe_params_init(void) {
  flashmoe_fused_moe_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* The plan has the launches of all three, in order, and is otherwise the layer's; workspace, stream
 * and errors are as in flashmoe_moe_route. */
FLASHMOE_API flashmoe_status flashmoe_fused_moe_plan(const flashmoe_fused_moe_params* params,
                                                     flashmoe_plan* plan);
FLASHMOE_API flashmoe_status
flashmoe_fused_moe_workspace_size(const flashmoe_fused_moe_params* params, size_t* bytes);
FLASHMOE_API flashmoe_status flashmoe_fused_moe(const flashmoe_fused_moe_params* params,
                                                void* workspace, size_t workspace_size,
                                                void* stream);

/* ------------------------------------------------------------------------------------------------
 * Layer, backward
 *
 * The gradients of flashmoe_moe_forward, from dout [T, H], in x's dtype, and what the forward was
 * given.
 *
 *   dx          [T, H]            rows as those of x
 *   dw_...      shape of the weights; layout, strides and alignment are their own, and like the
 *               weights' either the last stride or the one before it is 1
 *   db_...      [E, rows of that matrix], last stride 1; wanted or not as the caller likes, whether
 *               or not the forward had that bias
 *   dweights    [T, K] dtype of weights, contiguous: of the routing's weights; 0 of a pair without
 * a slot
 *
 * Any of them may be NULL: it is not wanted, and what only it needs is not computed. One at least
 * is required. They are fp32 or of x's dtype. With `accumulate` they are added to, in fp32 or fp64,
 * and else written: an expert without rows has gradients of 0. So two calls, one for dx and
 * dweights and one for the rest, do what one does, to the same bits, but for what both compute.
 *
 * The workspace is for T * K pairs whatever the routing is. With max_workspace_bytes the call goes
 * in chunks of 256 columns, or a multiple, of I and of H, each over all pairs, to the same bits.
 * The gradient of what act was applied to stays whole where dx is wanted. A bound that is too low
 * for chunks of 256 is refused.
 *
 * pre_activation is what the forward returned, or NULL: then it is computed again, to the same
 * bits as by the family's forward; w_gate_up and w_up are then on a GPU both transposed or neither.
 * With overwrite_pre_activation its memory may take what the workspace else would, and its contents
 * are undefined behind the call; it then overlaps nothing, as outputs do. With INTERLEAVED it is of
 * no use, and the workspace is planned that is without. What the gradients that are written hold
 * before is of no matter, nor what they hold until the call is over.
 *
 * Beyond `limit` g and u have gradients of 0; at it they have their own. RELU has the slope 0 at 0.
 * Products are accumulated in fp32, of fp64 in fp64. What lies between them, the gradient of what
 * act was applied to and the rows of dx before their sum over k, is kept in x's dtype. The same
 * inputs give the same bits on every run and with any number of threads. A NaN of a token reaches
 * its own dx and dweights and the dw and db of its experts, and nothing else. Whatever the routing
 * holds, nothing outside the tensors is read or written; a slot counts where `slots` and `pairs`
 * agree on it.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_moe_backward_params {
  size_t struct_size;
  const flashmoe_tensor* dout;
  const flashmoe_tensor* x; /* from here on as in flashmoe_moe_forward */
  const flashmoe_tensor* w_gate_up;
  const flashmoe_tensor* w_up;
  const flashmoe_tensor* w_down;
  const flashmoe_tensor* b_gate_up;
  const flashmoe_tensor* b_up;
  const flashmoe_tensor* b_down;
  const flashmoe_tensor* weights;
  const flashmoe_tensor* offsets;
  const flashmoe_tensor* pairs;
  const flashmoe_tensor* slots;
  const flashmoe_tensor* pre_activation; /* NULL: computed again */
  const flashmoe_tensor* dx;             /* out, from here on */
  const flashmoe_tensor* dw_gate_up;
  const flashmoe_tensor* dw_up; /* NULL unless SEPARATE, as is db_up */
  const flashmoe_tensor* dw_down;
  const flashmoe_tensor* db_gate_up;
  const flashmoe_tensor* db_up;
  const flashmoe_tensor* db_down;
  const flashmoe_tensor* dweights;
  int32_t gate;       /* flashmoe_moe_gate */
  int32_t activation; /* flashmoe_activation */
  float alpha;        /* as in flashmoe_moe_forward */
  float limit;
  float up_offset;
  int32_t weight_on_input;          /* 0 or 1 */
  int32_t accumulate;               /* 1: add to what the outputs hold */
  int32_t overwrite_pre_activation; /* 1: it may be workspace, and holds nothing afterwards */
  const char* kernel;               /* NULL: the best here. Else a kernel family */
  uint64_t max_workspace_bytes;     /* the most that the workspace may have; 0: no bound */
} flashmoe_moe_backward_params;

static inline flashmoe_moe_backward_params flashmoe_moe_backward_params_init(void) {
  flashmoe_moe_backward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

FLASHMOE_API flashmoe_status flashmoe_moe_backward_plan(const flashmoe_moe_backward_params* params,
                                                        flashmoe_plan* plan);
FLASHMOE_API flashmoe_status
flashmoe_moe_backward_workspace_size(const flashmoe_moe_backward_params* params, size_t* bytes);

/* Computes the gradients. workspace, stream and errors as in flashmoe_moe_route. */
FLASHMOE_API flashmoe_status flashmoe_moe_backward(const flashmoe_moe_backward_params* params,
                                                   void* workspace, size_t workspace_size,
                                                   void* stream);

/* ------------------------------------------------------------------------------------------------
 * Grouped product, backward
 *
 *   dx[r]     = w[e]^T dout[r]                        for every row r of every expert e
 *   dw[e]     = sum over its rows of dout[r] x[r]^T   [E, N, K]
 *   dbias[e]  = sum over its rows of dout[r]          [E, N]
 *
 * x, w, offsets and counts are those of flashmoe_grouped_product, dout is shaped as its out, and
 * dx, dw and dbias as x, w and bias. Outputs may be NULL, are of a dtype and are added to as in
 * flashmoe_moe_backward, and where they are, too. x may be NULL without dw, w without dx; then the
 * other tells K. Rows that no expert has get dx = 0.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_grouped_product_backward_params {
  size_t struct_size;
  const flashmoe_tensor* dout;
  const flashmoe_tensor* x;
  const flashmoe_tensor* w;
  const flashmoe_tensor* offsets;
  const flashmoe_tensor* counts;
  const flashmoe_tensor* dx; /* out, from here on */
  const flashmoe_tensor* dw;
  const flashmoe_tensor* dbias;
  int32_t accumulate; /* 1: add to what the outputs hold */
  uint32_t reserved;  /* 0 */
  const char* kernel;
} flashmoe_grouped_product_backward_params;

static inline flashmoe_grouped_product_backward_params
flashmoe_grouped_product_backward_params_init(void) {
  flashmoe_grouped_product_backward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

FLASHMOE_API flashmoe_status flashmoe_grouped_product_backward_plan(
    const flashmoe_grouped_product_backward_params* params, flashmoe_plan* plan);
FLASHMOE_API flashmoe_status flashmoe_grouped_product_backward_workspace_size(
    const flashmoe_grouped_product_backward_params* params, size_t* bytes);
FLASHMOE_API flashmoe_status
flashmoe_grouped_product_backward(const flashmoe_grouped_product_backward_params* params,
                                  void* workspace, size_t workspace_size, void* stream);

/* ------------------------------------------------------------------------------------------------
 * Routing, backward
 *
 * The gradients of flashmoe_moe_route's weights, and of its lse, by what it was given: of logits,
 * or of given weights. The choice of experts has no gradient, and neither have groups and a
 * selection bias, which decide nothing else.
 *
 * With `accumulate` they are added to what the output holds: the gradient of an auxiliary loss by
 * the same logits, for one. An id that is no expert has no gradient of its own; its given weight
 * takes part in the sum of `renormalize`, and has that sum's. A sum of 0, by which nothing is
 * divided, has none.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_moe_route_backward_params {
  size_t struct_size;
  const flashmoe_tensor* dweights; /* [T, K] fp32, with scores of fp64 fp64; contiguous */
  const flashmoe_tensor* ids;      /* [T, K] int32: those that the routing wrote */
  const flashmoe_tensor* logits;   /* [T, E] as in flashmoe_moe_route; NULL: weights were given */
  const flashmoe_tensor* given_weights;  /* [T, K] as there; NULL with logits */
  const flashmoe_tensor* dlse;           /* [T] dtype of dweights, contiguous: gradient of lse;
                                            NULL: none */
  const flashmoe_tensor* dlogits;        /* out [T, E] fp32 or the logits' dtype, last stride 1 */
  const flashmoe_tensor* dgiven_weights; /* out [T, K] fp32 or their dtype, last stride 1 */
  int32_t scoring;                       /* as in flashmoe_moe_route */
  int32_t renormalize;
  float scale;
  int32_t accumulate; /* 1: add to what the output holds */
} flashmoe_moe_route_backward_params;

static inline flashmoe_moe_route_backward_params flashmoe_moe_route_backward_params_init(void) {
  flashmoe_moe_route_backward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

FLASHMOE_API flashmoe_status flashmoe_moe_route_backward_plan(
    const flashmoe_moe_route_backward_params* params, flashmoe_plan* plan);
FLASHMOE_API flashmoe_status flashmoe_moe_route_backward_workspace_size(
    const flashmoe_moe_route_backward_params* params, size_t* bytes);
FLASHMOE_API flashmoe_status
flashmoe_moe_route_backward(const flashmoe_moe_route_backward_params* params, void* workspace,
                            size_t workspace_size, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLASHMOE_MOE_H_ */
