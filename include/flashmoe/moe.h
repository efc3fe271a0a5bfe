/* FlashMoE: mixture of experts. Included by flashmoe.h, whose rules hold here too; include that.
 *
 * A layer of E experts over T tokens, each of which takes K experts:
 *
 *   flashmoe_moe_route      logits [T, E] -> which experts, with what weights, in what order
 *   flashmoe_moe_forward    x [T, H], that, and the experts' weights -> out [T, H]
 *   flashmoe_fused_moe      x and a router's weights, or logits -> out: all of it
 *   flashmoe_grouped_product   the products alone (grouped GEMM), for rows that are sorted already
 *
 * Three of them have gradients: flashmoe_moe_backward, flashmoe_moe_route_backward and
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
 * From logits: `choice` ranks the experts of a token and the K greatest win; `score` gives weights.
 *
 *   SOFTMAX        choice = logits             score = softmax of all E logits
 *   TOPK_SOFTMAX   choice = logits             score = softmax of the K chosen logits
 *   SIGMOID        choice = logits, or with a selection_bias sigmoid(logits) + selection_bias
 *                                              score = sigmoid(logits)
 *
 *   weight = score, with `renormalize` divided by the sum of the token's K scores (if that is not
 *   0), then times `scale`.
 *
 * With num_groups > 1 (SIGMOID only) experts form groups of E / num_groups neighbours. A group's
 * score is the sum of its two greatest sigmoid(logits) + selection_bias, and experts are chosen
 * only from the top_groups greatest groups (DeepSeek-V3, arXiv:2412.19437).
 *
 * Ties go to the lower expert (group). NaN ranks last, as -inf does; the K experts of a token are
 * distinct whatever the logits are. Scores are computed in fp32, or for fp64 logits and weights
 * (CPU only) in fp64. NaN and Inf propagate into scores by IEEE arithmetic.
 *
 * Instead of logits the choice itself may be given, as given_ids. An id that is negative or not
 * below E is no expert of this call ("not mine"): its pair has no slot, id -1 and weight 0. With an
 * expert_map, ids must be below its length and are checked after the mapping. The scores are then
 * given_weights; renormalize divides by the sum of all K, including those not mine.
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
  const flashmoe_tensor* given_weights;  /* [T, K] dtypes of logits; NULL: all 1 */
  const flashmoe_tensor* expert_map;     /* [any] int32, id -> expert of this call; NULL: as is */
  const flashmoe_tensor* ids;            /* out [T, K] int32: experts, greatest choice first */
  const flashmoe_tensor* weights;        /* out [T, K] fp32, for fp64 logits or given weights
                                            fp64 */
  const flashmoe_tensor* offsets;        /* out [E + 1] int32: expert e has the slots offsets[e] to
                                            offsets[e + 1] - 1 */
  const flashmoe_tensor* pairs;          /* out [T * K] int32: the pair of each slot; -1 from
                                            offsets[E] on */
  const flashmoe_tensor* slots;          /* out [T, K] int32: the slot of each pair, or -1 */
  const flashmoe_tensor* lse; /* out [T] dtype of weights: log sum exp of the logits; NULL:
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
 * With `limit`, g is first clamped to at most limit, and u to -limit..limit (gpt-oss: limit 7,
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
 * H and I are multiples of 8. In an expert's matrix either the last stride or the one before it is
 * 1: a weight stored as [E, H, 2I] is passed as its transposed view. Other strides, also of x and
 * out, and the start of every tensor are multiples of 16 bytes, as is
 * any stride between experts. w_down may be transposed where w_gate_up is not, and vice
 * versa. Separate w_gate_up and w_up are both transposed or neither, except for "cpu".
 * "sm89_few_tokens" takes no transposed weights. Products are accumulated in fp32, or in fp64 for
 * fp64 inputs. a and y are kept in x's dtype; the sum over k is in the dtype of the products, in
 * the order of k. The same inputs give the same bits on every run. A token without experts gets 0.
 * A NaN or Inf in a token or an expert reaches only the experts and tokens it is paired with.
 * weights, offsets, pairs and slots are those of flashmoe_moe_route for the same T and K. Whatever
 * they hold, nothing outside the tensors is read or written.
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_moe_gate {
  FLASHMOE_MOE_GATE_UP = 0,     /* rows 0 .. I - 1 gate, I .. 2I - 1 up */
  FLASHMOE_MOE_UP_GATE = 1,     /* vice versa */
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
  const flashmoe_tensor* weights; /* [T, K] fp32, with an fp64 x also fp64 */
  const flashmoe_tensor* offsets; /* [E + 1] int32 */
  const flashmoe_tensor* pairs;   /* [T * K] int32 */
  const flashmoe_tensor* slots;   /* [T, K] int32 */
  const flashmoe_tensor* out;     /* [T, H] */
  /* Output [T * K, 2I] (g, then u), without a gate [T * K, I], x's dtype, last stride 1, by slot:
   * the input of act before `limit`. Rows without a pair are not written. NULL: not wanted */
  const flashmoe_tensor* pre_activation;
  int32_t gate;                   /* flashmoe_moe_gate */
  int32_t activation;             /* flashmoe_activation */
  float alpha;                    /* SILU only; finite; 0 = 1 */
  float limit;                    /* finite and positive; 0: none */
  float up_offset;                /* finite; 0 without a gate */
  int32_t weight_on_input;        /* 0 or 1 */
  const char* kernel;             /* NULL: the best here. Else a kernel family, as in attention */
  const flashmoe_tensor* x_scale; /* for 8-bit tensors, which this version does not take: NULL */
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
 *        [E, M, K] with counts [E]: expert e has the first counts[e] of its M rows
 *   w    [E, N, K], strides as those of an expert's matrix above
 *   out  [rows, N] or [E, M, N]; rows that belong to no expert are not written
 * Offsets and counts are clamped to the existing rows, so that {0, 2^31 - 1} gives one expert all.
 * If offsets decrease, which of the existing rows an expert has is not specified.
 * K and N are multiples of 8, rows and M at most 2^31 - 2^16; dtypes, alignment and accumulation as
 * above.
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
  const flashmoe_tensor* x_scale; /* for 8-bit tensors, which this version does not take: NULL */
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
 * with all intermediate results in the workspace. The bits are those of three calls. Arguments are
 * those of the two, except:
 *
 *   tokens          [T, H]  x of the layer
 *   router_weights  [E, H]  dtype of tokens, strides as those of an expert's matrix; E is a
 *                           multiple of 8 (for other E give logits); NULL with logits
 *   router_bias     [E]     fp32 or the dtype of tokens; NULL: none, and with logits
 *   logits          [T, E]  fp16, bf16, fp32, with fp64 tokens also fp64; NULL with router_weights
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

/* The plan lists the launches of all three, in order, and otherwise is the layer's. workspace,
 * stream and errors are as in flashmoe_moe_route. */
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
 * Computes the gradients of flashmoe_moe_forward from dout [T, H], in x's dtype, and the forward's
 * inputs.
 *
 *   dx          [T, H]            rows as those of x
 *   dw_...      shape of the weights, with their own layout, strides and alignment; as for weights,
 *               either the last stride or the one before it is 1
 *   db_...      [E, rows of that matrix], last stride 1; optional, whether or not the forward had
 *               that bias
 *   dweights    [T, K] dtype of weights, contiguous: of the routing's weights; 0 without a slot
 *
 * Any of them may be NULL (not wanted); what only it needs is then not computed. At least one is
 * required. They are fp32 or x's dtype. With `accumulate` they are added to, in fp32 or fp64;
 * otherwise they are written, and an expert without rows has gradients of 0. So two calls, one for
 * dx and dweights and one for the rest, give the bits of one call; they repeat what both need.
 *
 * The workspace holds T * K pairs whatever the routing is. With max_workspace_bytes the call goes
 * in chunks of 256 columns, or a multiple, of I and of H, each over all pairs, with the same bits.
 * The gradient of act's input stays whole if dx is wanted. A bound too low for chunks of 256 is
 * refused.
 *
 * pre_activation is what the forward returned. If NULL, it is computed again with the bits of the
 * family's forward; on a GPU w_gate_up and w_up are then both transposed or neither. With
 * overwrite_pre_activation the call may use its memory as workspace: its contents are undefined
 * afterwards, and like outputs it must overlap nothing. With INTERLEAVED this saves nothing, and
 * the workspace is that of a call without it. Gradients that are written (not added to) may hold
 * anything before the call, and hold anything until it ends.
 *
 * Beyond `limit`, g and u have gradients of 0; at the limit they have their own. RELU has slope 0
 * at 0. Products are accumulated in fp32, or in fp64 for fp64 inputs. Intermediate results, the
 * gradient of act's input and the rows of dx before their sum over k, are kept in x's dtype. The
 * same inputs give the same bits on every run and with any number of threads. A NaN in a token
 * reaches its own dx and dweights and the dw and db of its experts, and nothing else. Whatever the
 * routing holds, nothing outside the tensors is read or written; a slot counts if `slots` and
 * `pairs` agree on it.
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
  int32_t overwrite_pre_activation; /* 1: the call may use it as workspace */
  const char* kernel;               /* NULL: the best here. Else a kernel family */
  uint64_t max_workspace_bytes;     /* bound of the workspace; 0: no bound */
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
 * x, w, offsets and counts are those of flashmoe_grouped_product. dout has the shape of its out,
 * and dx, dw and dbias those of x, w and bias. The rules of flashmoe_moe_backward hold for outputs
 * that are NULL, their dtypes, `accumulate` and layouts. x may be NULL without dw, w without dx;
 * the other then tells K. Rows that belong to no expert get dx = 0.
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
 * Computes the gradient of logits, or of given weights, from those of flashmoe_moe_route's weights
 * and lse. The choice of experts has no gradient; neither have groups and a selection bias, which
 * decide nothing else.
 *
 * With `accumulate` it is added to what the output holds, such as the gradient of an auxiliary loss
 * on the same logits. An id that is no expert has no gradient of its own; its given weight takes
 * part in the sum of `renormalize` and gets that sum's gradient. A sum of 0 divides nothing and has
 * no gradient.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_moe_route_backward_params {
  size_t struct_size;
  const flashmoe_tensor* dweights; /* [T, K] fp32, with fp64 scores fp64; contiguous */
  const flashmoe_tensor* ids;      /* [T, K] int32: as written by the routing */
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
