// The layer, forward: its options, its checks and its families. See core/operation.h for the rest.
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"
#include "core/ops/moe/options.h"

namespace flashmoe {
namespace {

using Params = flashmoe_moe_forward_params;

flashmoe_status check_together(const flashmoe_moe_forward_params& params) {
  if (params.alpha != 0.0f && params.activation != FLASHMOE_ACTIVATION_SILU) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "alpha: got %g, accepted is the default unless activation is silu",
                static_cast<double>(params.alpha));
  }
  if (params.up_offset != 0.0f && params.gate == FLASHMOE_MOE_NO_GATE) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "up_offset: got %g, accepted without a gate is 0",
                static_cast<double>(params.up_offset));
  }
  if (params.gate == FLASHMOE_MOE_SEPARATE) return FLASHMOE_OK;
  FLASHMOE_TRY(check_absent("w_up", params.w_up, "unless gate is 3 (separate)"));
  return check_absent("b_up", params.b_up, "unless gate is 3 (separate)");
}

struct Matrices {
  View gate_up;
  View up;  // SEPARATE only
  View down;
};

flashmoe_status read_matrices(const flashmoe_moe_forward_params& params, const char* x_name,
                              MoeForwardProblem* p, Matrices* m) {
  const bool two = params.gate == FLASHMOE_MOE_SEPARATE;
  const bool stacked = !two && params.gate != FLASHMOE_MOE_NO_GATE;
  const auto check = [=](const char* name, const flashmoe_tensor* tensor, View* view) {
    return check_matrix(name, tensor, x_name, p->x.dtype, p->device, view);
  };
  FLASHMOE_TRY(check("w_gate_up", params.w_gate_up, &m->gate_up));
  const int64_t rows = m->gate_up.shape[1];
  if (stacked && rows % (2 * kExtentMultiple) != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "w_gate_up: its number of rows is %lld, accepted for gate and up together are "
                "multiples of %lld",
                static_cast<long long>(rows), static_cast<long long>(2 * kExtentMultiple));
  }
  p->experts = static_cast<int32_t>(m->gate_up.shape[0]);
  p->inner = stacked ? rows / 2 : rows;
  FLASHMOE_TRY(
      check_extent("w_gate_up", "number of columns", m->gate_up.shape[2], x_name, p->hidden));
  if (two) {
    FLASHMOE_TRY(check("w_up", params.w_up, &m->up));
    FLASHMOE_TRY(
        check_extent("w_up", "number of experts", m->up.shape[0], "w_gate_up", p->experts));
    FLASHMOE_TRY(check_extent("w_up", "number of rows", m->up.shape[1], "w_gate_up", rows));
    FLASHMOE_TRY(check_extent("w_up", "number of columns", m->up.shape[2], x_name, p->hidden));
  }
  FLASHMOE_TRY(check("w_down", params.w_down, &m->down));
  FLASHMOE_TRY(
      check_extent("w_down", "number of experts", m->down.shape[0], "w_gate_up", p->experts));
  FLASHMOE_TRY(check_extent("w_down", "number of rows", m->down.shape[1], x_name, p->hidden));
  FLASHMOE_TRY(check_extent("w_down", "number of columns", m->down.shape[2],
                            stacked ? "half of w_gate_up's rows" : "w_gate_up's rows", p->inner));
  return FLASHMOE_OK;
}

// Where the rows of gate and up begin, and how far apart they are.
struct RowOrder {
  int64_t gate;
  int64_t up;
  int64_t step;
};

RowOrder row_order(int32_t gate, int64_t inner) {
  switch (gate) {
    case FLASHMOE_MOE_GATE_UP: return {0, inner, 1};
    case FLASHMOE_MOE_UP_GATE: return {inner, 0, 1};
    case FLASHMOE_MOE_INTERLEAVED: return {0, 1, 2};
    default: return {0, 0, 1};  // separate tensors, or no gate
  }
}

flashmoe_status read_biases(const flashmoe_moe_forward_params& params, const char* x_name,
                            const RowOrder& order, const Matrices& m, MoeForwardProblem* p) {
  const bool two = params.gate == FLASHMOE_MOE_SEPARATE;
  const auto check = [=](const char* name, const flashmoe_tensor* tensor, const char* matrix,
                         int64_t rows, View* view, Dtype* dtype) {
    return check_bias(name, tensor, x_name, p->x.dtype, p->device, p->experts, rows, matrix, view,
                      dtype);
  };
  View view;
  Dtype dtype;
  if (params.b_gate_up != nullptr) {
    FLASHMOE_TRY(
        check("b_gate_up", params.b_gate_up, "w_gate_up", m.gate_up.shape[1], &view, &dtype));
    if (p->gated) p->gate_bias = rows_of_bias(view, dtype, order.gate, order.step);
    if (!two) p->up_bias = rows_of_bias(view, dtype, order.up, order.step);
  }
  if (params.b_up != nullptr) {
    FLASHMOE_TRY(check("b_up", params.b_up, "w_up", p->inner, &view, &dtype));
    p->up_bias = rows_of_bias(view, dtype, 0, 1);
  }
  if (params.b_down != nullptr) {
    FLASHMOE_TRY(check("b_down", params.b_down, "w_down", p->hidden, &view, &dtype));
    p->down_bias = rows_of_bias(view, dtype, 0, 1);
  }
  return FLASHMOE_OK;
}

flashmoe_status read_routing(const flashmoe_moe_forward_params& params, const char* x_name,
                             MoeForwardProblem* p) {
  View weights, offsets, pairs, slots;
  Dtype dtype;
  FLASHMOE_TRY(check_numbers_or_fp32("weights", params.weights, 2, x_name, p->x.dtype, p->device,
                                     &weights, &dtype));
  FLASHMOE_TRY(check_extent("weights", "number of tokens", weights.shape[0], x_name, p->tokens));
  FLASHMOE_TRY(check_top_k("weights", weights.shape[1]));
  p->top_k = static_cast<int32_t>(weights.shape[1]);
  FLASHMOE_TRY(check_pairs("weights", p->tokens, p->top_k));
  FLASHMOE_TRY(check_int32_tensor("offsets", params.offsets, 1, x_name, p->device, &offsets));
  FLASHMOE_TRY(check_extent("offsets", "number of experts and one more", offsets.shape[0],
                            "w_gate_up", int64_t{p->experts} + 1));
  FLASHMOE_TRY(check_int32_tensor("pairs", params.pairs, 1, x_name, p->device, &pairs));
  FLASHMOE_TRY(
      check_extent("pairs", "number of pairs", pairs.shape[0], "weights", p->tokens * p->top_k));
  FLASHMOE_TRY(check_int32_tensor("slots", params.slots, 2, x_name, p->device, &slots));
  FLASHMOE_TRY(check_extent("slots", "number of tokens", slots.shape[0], x_name, p->tokens));
  FLASHMOE_TRY(
      check_extent("slots", "number of experts of a token", slots.shape[1], "weights", p->top_k));
  set_numbers(weights, dtype, &p->weights, &p->wide_weights);
  p->offsets = static_cast<const int32_t*>(offsets.data);
  p->pairs = static_cast<const int32_t*>(pairs.data);
  p->slots = static_cast<const int32_t*>(slots.data);
  return FLASHMOE_OK;
}

// Checks the rows of the pairs, as workspaces hold them.
flashmoe_status check_all_pair_rows(const MoeForwardProblem& p, const char* x_name) {
  FLASHMOE_TRY(check_pair_rows(x_name, p.tokens * p.top_k, p.hidden));
  return check_pair_rows("w_gate_up", p.tokens * p.top_k, p.inner);
}

}  // namespace

flashmoe_status MoeForward::make_problem(const Params& params, Problem* problem,
                                         const char* x_name) {
  FLASHMOE_TRY(read_layer(params, problem, x_name));
  FLASHMOE_TRY(read_routing(params, x_name, problem));
  return read_outputs(params, problem, x_name);
}

flashmoe_status MoeForward::read_inputs(const Params& params, Problem* problem,
                                        const char* x_name) {
  FLASHMOE_TRY(read_layer(params, problem, x_name));
  FLASHMOE_TRY(read_routing(params, x_name, problem));
  return check_all_pair_rows(*problem, x_name);
}

flashmoe_status MoeForward::read_outputs(const Params& params, Problem* p, const char* x_name) {
  FLASHMOE_TRY(check_all_pair_rows(*p, x_name));
  const int64_t bytes = dtype_bytes(p->x.dtype);
  View out;
  FLASHMOE_TRY(check_view("out", params.out, 2, &out));
  FLASHMOE_TRY(check_same_device("out", *params.out, x_name, p->device));
  FLASHMOE_TRY(check_same_dtype("out", *params.out, x_name, p->x.dtype));
  FLASHMOE_TRY(check_rows("out", out, 2, bytes));
  FLASHMOE_TRY(check_extent("out", "number of tokens", out.shape[0], x_name, p->tokens));
  FLASHMOE_TRY(check_extent("out", "hidden size", out.shape[1], x_name, p->hidden));
  FLASHMOE_TRY(check_no_overlap("out", out, 2));
  p->out.data = out.data;
  p->out.dtype = p->x.dtype;
  p->out.row_stride = out.strides[0];
  if (params.pre_activation == nullptr) return FLASHMOE_OK;
  View pre;
  FLASHMOE_TRY(check_view("pre_activation", params.pre_activation, 2, &pre));
  FLASHMOE_TRY(check_same_device("pre_activation", *params.pre_activation, x_name, p->device));
  FLASHMOE_TRY(check_same_dtype("pre_activation", *params.pre_activation, x_name, p->x.dtype));
  FLASHMOE_TRY(check_rows("pre_activation", pre, 2, bytes));
  FLASHMOE_TRY(check_extent("pre_activation", "number of pairs", pre.shape[0], "weights",
                            p->tokens * p->top_k));
  FLASHMOE_TRY(check_extent("pre_activation", "number of columns", pre.shape[1],
                            p->gated ? "gate and up together" : "w_gate_up's rows",
                            p->gated ? 2 * p->inner : p->inner));
  FLASHMOE_TRY(check_no_overlap("pre_activation", pre, 2));
  p->pre_activation.data = pre.data;
  p->pre_activation.dtype = p->x.dtype;
  p->pre_activation.row_stride = pre.strides[0];
  return FLASHMOE_OK;
}

flashmoe_status MoeForward::read_layer(const Params& params, Problem* problem, const char* x_name) {
  Problem& p = *problem;
  FLASHMOE_TRY(check_options(kLayerOptions<Params>, params));
  FLASHMOE_TRY(check_together(params));
  FLASHMOE_TRY(check_no_scale("x_scale", params.x_scale));
  FLASHMOE_TRY(check_no_scale("w_gate_up_scale", params.w_gate_up_scale));
  FLASHMOE_TRY(check_no_scale("w_up_scale", params.w_up_scale));
  FLASHMOE_TRY(check_no_scale("w_down_scale", params.w_down_scale));
  View x;
  FLASHMOE_TRY(check_view(x_name, params.x, 2, &x));
  FLASHMOE_TRY(check_device(x_name, *params.x, &p.device));
  FLASHMOE_TRY(check_first_dtype(x_name, *params.x, p.device, &p.x.dtype));
  FLASHMOE_TRY(check_multiple(x_name, "hidden size", x.shape[1]));
  FLASHMOE_TRY(check_rows(x_name, x, 2, dtype_bytes(p.x.dtype)));
  p.tokens = x.shape[0];
  p.hidden = x.shape[1];
  p.x.data = x.data;
  p.x.row_stride = p.tokens > 1 ? x.strides[0] : p.hidden;  // the stride of a single row may be
                                                            // anything

  p.gated = params.gate != FLASHMOE_MOE_NO_GATE;
  Matrices m = {};
  FLASHMOE_TRY(read_matrices(params, x_name, &p, &m));
  const RowOrder order = row_order(params.gate, p.inner);
  if (p.gated) p.gate = rows_of(m.gate_up, p.x.dtype, order.gate, order.step);
  const View& up = params.gate == FLASHMOE_MOE_SEPARATE ? m.up : m.gate_up;
  p.up = rows_of(up, p.x.dtype, order.up, order.step);
  p.down = rows_of(m.down, p.x.dtype, 0, 1);
  FLASHMOE_TRY(read_biases(params, x_name, order, m, &p));

  p.activation = static_cast<flashmoe_activation>(params.activation);
  p.alpha = params.alpha != 0.0f ? params.alpha : 1.0f;
  p.limit = params.limit != 0.0f ? params.limit : std::numeric_limits<float>::infinity();
  p.up_offset = params.up_offset;
  p.weight_on_input = params.weight_on_input != 0;
  copy_kernel_name(params.kernel, &p.kernel);
  return FLASHMOE_OK;
}

double MoeForward::flops(const Problem& p) {
  const double products = p.gated ? 3.0 : 2.0;
  return 2.0 * products * static_cast<double>(p.tokens * p.top_k) * static_cast<double>(p.hidden) *
         static_cast<double>(p.inner);
}

void MoeForward::print(const Params& params, const Problem& p, char* text, size_t size) {
  const bool biased =
      p.gate_bias.data != nullptr || p.up_bias.data != nullptr || p.down_bias.data != nullptr;
  char options[160];
  print_options(kLayerOptions<Params>, params, options, sizeof options);
  std::snprintf(text, size,
                "tokens=%lld hidden=%lld inner=%lld experts=%d top_k=%d %s%s bias=%s "
                "pre_activation=%s",
                static_cast<long long>(p.tokens), static_cast<long long>(p.hidden),
                static_cast<long long>(p.inner), p.experts, p.top_k, dtype_name(p.x.dtype), options,
                biased ? "yes" : "no", p.pre_activation.data != nullptr ? "yes" : "no");
}

}  // namespace flashmoe

using flashmoe::MoeForward;

flashmoe_status flashmoe_moe_forward_plan(const flashmoe_moe_forward_params* params,
                                          flashmoe_plan* plan) {
  return flashmoe::plan_operation<MoeForward>(params, plan);
}

flashmoe_status flashmoe_moe_forward_workspace_size(const flashmoe_moe_forward_params* params,
                                                    size_t* bytes) {
  return flashmoe::workspace_size_of<MoeForward>(params, bytes);
}

flashmoe_status flashmoe_moe_forward(const flashmoe_moe_forward_params* params, void* workspace,
                                     size_t workspace_size, void* stream) {
  return flashmoe::run_operation<MoeForward>(params, workspace, workspace_size, stream);
}
