// The layer, backward: its options, its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstddef>
#include <cstdio>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"
#include "core/ops/moe/options.h"

namespace flashmoe {
namespace {

using Params = flashmoe_moe_backward_params;

// They follow those of the layer.
constexpr Option<Params> kOptions[] = {
    Option<Params>::flag("accumulate", &Params::accumulate),
    Option<Params>::flag("overwrite_pre_activation", &Params::overwrite_pre_activation),
    Option<Params>::size("max_workspace_bytes", &Params::max_workspace_bytes),
};

// The forward call of these gradients, without its outputs.
flashmoe_moe_forward_params forward_of(const Params& params) {
  flashmoe_moe_forward_params forward = flashmoe_moe_forward_params_init();
  forward.x = params.x;
  forward.w_gate_up = params.w_gate_up;
  forward.w_up = params.w_up;
  forward.w_down = params.w_down;
  forward.b_gate_up = params.b_gate_up;
  forward.b_up = params.b_up;
  forward.b_down = params.b_down;
  forward.weights = params.weights;
  forward.offsets = params.offsets;
  forward.pairs = params.pairs;
  forward.slots = params.slots;
  forward.gate = params.gate;
  forward.activation = params.activation;
  forward.alpha = params.alpha;
  forward.limit = params.limit;
  forward.up_offset = params.up_offset;
  forward.weight_on_input = params.weight_on_input;
  return forward;
}

// All rows of w_gate_up. If gate and up are stacked, they lie as those of the gate alone, but twice
// as many.
ExpertMatrix all_rows(const MoeForwardProblem& layer, flashmoe_moe_gate gate) {
  switch (gate) {
    case FLASHMOE_MOE_GATE_UP:
    case FLASHMOE_MOE_SEPARATE: return layer.gate;
    case FLASHMOE_MOE_INTERLEAVED: {
      ExpertMatrix all = layer.gate;
      all.row_stride /= 2;
      return all;
    }
    case FLASHMOE_MOE_UP_GATE:
    case FLASHMOE_MOE_NO_GATE: break;
  }
  return layer.up;
}

flashmoe_status read_given(const Params& params, MoeBackwardProblem* p) {
  const MoeForwardProblem& layer = p->layer;
  const int64_t bytes = dtype_bytes(layer.x.dtype);
  View dout;
  FLASHMOE_TRY(check_view("dout", params.dout, 2, &dout));
  FLASHMOE_TRY(check_same_device("dout", *params.dout, "x", p->device));
  FLASHMOE_TRY(check_same_dtype("dout", *params.dout, "x", layer.x.dtype));
  FLASHMOE_TRY(check_rows("dout", dout, 2, bytes));
  FLASHMOE_TRY(check_extent("dout", "number of tokens", dout.shape[0], "x", layer.tokens));
  FLASHMOE_TRY(check_extent("dout", "hidden size", dout.shape[1], "x", layer.hidden));
  p->dout.data = dout.data;
  p->dout.dtype = layer.x.dtype;
  p->dout.row_stride = layer.tokens > 1 ? dout.strides[0] : layer.hidden;
  if (params.pre_activation == nullptr) {
    if (params.overwrite_pre_activation == 0) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "overwrite_pre_activation: got 1, accepted without pre_activation is 0");
  }
  View pre;
  FLASHMOE_TRY(check_view("pre_activation", params.pre_activation, 2, &pre));
  FLASHMOE_TRY(check_same_device("pre_activation", *params.pre_activation, "x", p->device));
  FLASHMOE_TRY(check_same_dtype("pre_activation", *params.pre_activation, "x", layer.x.dtype));
  FLASHMOE_TRY(check_rows("pre_activation", pre, 2, bytes));
  FLASHMOE_TRY(check_extent("pre_activation", "number of pairs", pre.shape[0], "weights",
                            layer.tokens * layer.top_k));
  FLASHMOE_TRY(check_extent("pre_activation", "number of columns", pre.shape[1],
                            layer.gated ? "gate and up together" : "w_gate_up's rows",
                            layer.gated ? 2 * layer.inner : layer.inner));
  p->pre_activation.data = pre.data;
  p->pre_activation.dtype = layer.x.dtype;
  p->pre_activation.row_stride = pre.strides[0];
  p->overwrites = params.overwrite_pre_activation != 0;
  if (p->overwrites) FLASHMOE_TRY(check_no_overlap("pre_activation", pre, 2));
  return FLASHMOE_OK;
}

flashmoe_status check_some_output(const Params& params) {
  for (const flashmoe_tensor* each :
       {params.dx, params.dw_gate_up, params.dw_up, params.dw_down, params.db_gate_up, params.db_up,
        params.db_down, params.dweights}) {
    if (each != nullptr) return FLASHMOE_OK;
  }
  return fail(
      FLASHMOE_ERROR_INVALID_ARGUMENT,
      "dx: got a null tensor, as all other gradients did; one of them at least is required");
}

flashmoe_status read_outputs(const Params& params, MoeBackwardProblem* p) {
  const MoeForwardProblem& layer = p->layer;
  const Dtype dtype = layer.x.dtype;
  const bool two = params.gate == FLASHMOE_MOE_SEPARATE;
  if (!two) {
    FLASHMOE_TRY(check_absent("dw_up", params.dw_up, "unless gate is 3 (separate)"));
    FLASHMOE_TRY(check_absent("db_up", params.db_up, "unless gate is 3 (separate)"));
  }
  FLASHMOE_TRY(check_some_output(params));
  View x = {};
  x.shape[0] = layer.tokens;
  x.shape[1] = layer.hidden;
  FLASHMOE_TRY(check_row_gradient("dx", params.dx, 2, "x", x, dtype, p->device, &p->dx));
  const int64_t rows = layer.gated && !two ? 2 * layer.inner : layer.inner;
  const int64_t up[] = {layer.experts, rows, layer.hidden};
  const int64_t down[] = {layer.experts, layer.hidden, layer.inner};
  const auto matrix = [&](const char* name, const flashmoe_tensor* tensor, const char* of,
                          const int64_t (&shape)[3], MatrixGradient* gradient) {
    return check_matrix_gradient(name, tensor, of, shape, dtype, p->device, gradient);
  };
  FLASHMOE_TRY(matrix("dw_gate_up", params.dw_gate_up, "w_gate_up", up, &p->dw_gate_up));
  FLASHMOE_TRY(matrix("dw_up", params.dw_up, "w_up", up, &p->dw_up));
  FLASHMOE_TRY(matrix("dw_down", params.dw_down, "w_down", down, &p->dw_down));
  const auto bias = [&](const char* name, const flashmoe_tensor* tensor, const char* matrix_name,
                        int64_t count, BiasGradient* gradient) {
    return check_bias_gradient(name, tensor, matrix_name, layer.experts, count, "x", dtype,
                               p->device, gradient);
  };
  FLASHMOE_TRY(bias("db_gate_up", params.db_gate_up, "w_gate_up", rows, &p->db_gate_up));
  FLASHMOE_TRY(bias("db_up", params.db_up, "w_up", rows, &p->db_up));
  FLASHMOE_TRY(bias("db_down", params.db_down, "w_down", layer.hidden, &p->db_down));
  if (params.dweights == nullptr) return FLASHMOE_OK;
  View dweights;
  // Asks the tensor, since without tokens its pointer may be null.
  const bool wide = params.weights->dtype.bits == 64;
  const Dtype of_weights = wide ? Dtype::kFloat64 : Dtype::kFloat32;
  FLASHMOE_TRY(
      check_numbers("dweights", params.dweights, 2, "weights", of_weights, p->device, &dweights));
  FLASHMOE_TRY(
      check_extent("dweights", "number of tokens", dweights.shape[0], "weights", layer.tokens));
  FLASHMOE_TRY(check_extent("dweights", "number of experts of a token", dweights.shape[1],
                            "weights", layer.top_k));
  set_numbers(dweights, of_weights, &p->dweights, &p->wide_dweights);
  return FLASHMOE_OK;
}

struct MoeBackward {
  using Params = flashmoe_moe_backward_params;
  using Problem = MoeBackwardProblem;
  static constexpr char kName[] = "moe_backward";
  static constexpr char kParams[] = "flashmoe_moe_backward_params";
  static constexpr char kSizeFunction[] = "flashmoe_moe_backward_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, max_workspace_bytes);

  static constexpr std::array<TensorMember<Params>, 21> kTensors = {{
      {"dout", &Params::dout},
      {"x", &Params::x},
      {"w_gate_up", &Params::w_gate_up},
      {"w_up", &Params::w_up},
      {"w_down", &Params::w_down},
      {"b_gate_up", &Params::b_gate_up},
      {"b_up", &Params::b_up},
      {"b_down", &Params::b_down},
      {"weights", &Params::weights},
      {"offsets", &Params::offsets},
      {"pairs", &Params::pairs},
      {"slots", &Params::slots},
      {"pre_activation", &Params::pre_activation},
      {"dx", &Params::dx},
      {"dw_gate_up", &Params::dw_gate_up},
      {"dw_up", &Params::dw_up},
      {"dw_down", &Params::dw_down},
      {"db_gate_up", &Params::db_gate_up},
      {"db_up", &Params::db_up},
      {"db_down", &Params::db_down},
      {"dweights", &Params::dweights},
  }};
  static constexpr size_t kFirstOutput = 13;
  static size_t first_written(const Params& params) {
    return kFirstOutput - (params.overwrite_pre_activation != 0 ? 1 : 0);
  }
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const MoeBackwardFamily* kFamilies[] = {
#if FLASHMOE_WITH_SM90
      &kSm90MoeBackward,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89MoeBackward,
#endif
      &kCpuMoeBackward,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    Problem& p = *problem;
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(MoeForward::read_inputs(forward_of(params), &p.layer, "x"));
    p.device = p.layer.device;
    p.order = static_cast<flashmoe_moe_gate>(params.gate);
    p.gate_up = all_rows(p.layer, p.order);
    FLASHMOE_TRY(read_given(params, &p));
    FLASHMOE_TRY(read_outputs(params, &p));
    p.accumulate = params.accumulate != 0;
    p.max_workspace_bytes = params.max_workspace_bytes;
    copy_kernel_name(params.kernel, &p.kernel);
    return FLASHMOE_OK;
  }

  static bool wants_dweights(const Problem& p) {
    return p.dweights != nullptr || p.wide_dweights != nullptr;
  }

  // Counts the products that the outputs need.
  static double flops(const Problem& p) {
    const MoeForwardProblem& layer = p.layer;
    const double ups = layer.gated ? 2.0 : 1.0;
    const bool up_weights = p.dw_gate_up.data != nullptr || p.dw_up.data != nullptr;
    const bool of_pre_activation = p.dx.data != nullptr || wants_dweights(p) || up_weights ||
                                   p.db_gate_up.data != nullptr || p.db_up.data != nullptr;
    double products = 0.0;
    if (of_pre_activation) products += 1.0;
    if (p.dx.data != nullptr || (wants_dweights(p) && layer.weight_on_input)) products += ups;
    if (up_weights) products += ups;
    if (p.dw_down.data != nullptr) products += 1.0;
    if (p.pre_activation.data == nullptr && (of_pre_activation || p.dw_down.data != nullptr)) {
      products += ups;
    }
    return 2.0 * products * static_cast<double>(layer.tokens * layer.top_k) *
           static_cast<double>(layer.hidden) * static_cast<double>(layer.inner);
  }

  static bool is_empty(const Problem&) { return false; }  // gradients of weights are written too

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char layer[160];
    char options[80];
    print_options(kLayerOptions<Params>, params, layer, sizeof layer);
    print_options(kOptions, params, options, sizeof options);
    const auto dtype_of = [](const auto& gradient) {
      return gradient.data != nullptr ? dtype_name(gradient.dtype) : "no";
    };
    std::snprintf(text, size,
                  "tokens=%lld hidden=%lld inner=%lld experts=%d top_k=%d %s%s%s "
                  "pre_activation=%s dx=%s dw_gate_up=%s dw_up=%s dw_down=%s db=%s/%s/%s "
                  "dweights=%s",
                  static_cast<long long>(p.layer.tokens), static_cast<long long>(p.layer.hidden),
                  static_cast<long long>(p.layer.inner), p.layer.experts, p.layer.top_k,
                  dtype_name(p.layer.x.dtype), layer, options,
                  p.pre_activation.data != nullptr ? "yes" : "no", dtype_of(p.dx),
                  dtype_of(p.dw_gate_up), dtype_of(p.dw_up), dtype_of(p.dw_down),
                  dtype_of(p.db_gate_up), dtype_of(p.db_up), dtype_of(p.db_down),
                  wants_dweights(p) ? "yes" : "no");
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::MoeBackward;

flashmoe_status flashmoe_moe_backward_plan(const flashmoe_moe_backward_params* params,
                                           flashmoe_plan* plan) {
  return flashmoe::plan_operation<MoeBackward>(params, plan);
}

flashmoe_status flashmoe_moe_backward_workspace_size(const flashmoe_moe_backward_params* params,
                                                     size_t* bytes) {
  return flashmoe::workspace_size_of<MoeBackward>(params, bytes);
}

flashmoe_status flashmoe_moe_backward(const flashmoe_moe_backward_params* params, void* workspace,
                                      size_t workspace_size, void* stream) {
  return flashmoe::run_operation<MoeBackward>(params, workspace, workspace_size, stream);
}
