// The router's product, routing and the layer in one call: three operations whose intermediates lie
// in the call's workspace.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"

namespace flashmoe {
namespace {

constexpr int64_t kRegionAlignment = 256;
constexpr int32_t kAllRows[2] = {0, INT32_MAX};  // one expert; clamped to the existing rows

struct FusedMoe {
  using Params = flashmoe_fused_moe_params;
  static constexpr char kName[] = "fused_moe";
  static constexpr char kParams[] = "flashmoe_fused_moe_params";
  static constexpr char kSizeFunction[] = "flashmoe_fused_moe_workspace_size";
  static constexpr std::array<TensorMember<Params>, 12> kTensors = {{
      {"tokens", &Params::tokens},
      {"router_weights", &Params::router_weights},
      {"router_bias", &Params::router_bias},
      {"logits", &Params::logits},
      {"selection_bias", &Params::selection_bias},
      {"w_gate_up", &Params::w_gate_up},
      {"w_up", &Params::w_up},
      {"w_down", &Params::w_down},
      {"b_gate_up", &Params::b_gate_up},
      {"b_up", &Params::b_up},
      {"b_down", &Params::b_down},
      {"out", &Params::out},
  }};
  static constexpr size_t kFirstOutput = 11;
  static constexpr size_t kGpuAlignment = 256;
};

// Offsets of the intermediates in the workspace.
struct Between {
  int64_t logits, ids, weights, offsets, pairs, slots;
  int64_t bytes;  // of all
};

// One call: its three operations and their intermediates.
struct Call {
  FusedMoe::Params params;
  flashmoe_device where;  // as in problems
  bool with_product;
  bool wide_weights;
  Between between;
  GroupedProductProblem product;
  MoeRouteProblem route;
  MoeForwardProblem forward;
  flashmoe_moe_route_params route_params;  // those that the caller gave
  flashmoe_moe_forward_params forward_params;
};

flashmoe_status check_top_k_of(int32_t top_k, int64_t experts) {
  if (top_k >= 1 && top_k <= std::min(experts, kMaxTopK)) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "top_k: got %d, accepted are 1 to %lld, and no more than the %lld experts", top_k,
              static_cast<long long>(kMaxTopK), static_cast<long long>(experts));
}

flashmoe_status check_sources(const FusedMoe::Params& params) {
  if ((params.router_weights != nullptr) == (params.logits != nullptr)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "router_weights: got %s, accepted is one of the two",
                params.logits != nullptr ? "both it and logits" : "neither it nor logits");
  }
  if (params.logits == nullptr) return FLASHMOE_OK;
  return check_absent("router_bias", params.router_bias, "with logits");
}

// The router's product has a single expert, which has all rows.
flashmoe_status read_router(const View& tokens, Dtype dtype, Call* call) {
  const FusedMoe::Params& params = call->params;
  constexpr char kName[] = "router_weights";
  View weights;
  FLASHMOE_TRY(check_view(kName, params.router_weights, 2, &weights));
  FLASHMOE_TRY(check_same_device(kName, *params.router_weights, "tokens", call->where));
  FLASHMOE_TRY(check_same_dtype(kName, *params.router_weights, "tokens", dtype));
  const int64_t experts = weights.shape[0];
  FLASHMOE_TRY(check_experts(kName, experts));
  if (experts % kExtentMultiple != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got %lld experts, accepted are multiples of %lld, or logits in its place",
                kName, static_cast<long long>(experts), static_cast<long long>(kExtentMultiple));
  }
  FLASHMOE_TRY(
      check_extent(kName, "number of columns", weights.shape[1], "tokens", tokens.shape[1]));
  FLASHMOE_TRY(check_matrix_layout(kName, weights, 2, dtype_bytes(dtype)));
  GroupedProductProblem& p = call->product;
  clear(&p);
  p.device = call->where;
  p.experts = 1;
  p.rows = tokens.shape[0];
  p.columns = tokens.shape[1];
  p.out_columns = experts;
  p.x = {tokens.data, p.rows > 1 ? tokens.strides[0] : p.columns, 0, dtype, 0};
  p.w = {weights.data, 0, weights.strides[0], weights.strides[1], dtype, 0};
  p.out = {nullptr, p.out_columns, 0, dtype, 0};
  p.offsets = kAllRows;
  if (params.router_bias == nullptr) return FLASHMOE_OK;
  View bias;
  FLASHMOE_TRY(check_view("router_bias", params.router_bias, 1, &bias));
  return check_extent("router_bias", "number of experts", bias.shape[0], kName, experts);
}

flashmoe_status check_logits(const Call& call, const View& tokens, Dtype dtype, int64_t* experts) {
  const flashmoe_tensor* const given = call.params.logits;
  View logits;
  FLASHMOE_TRY(check_view("logits", given, 2, &logits));
  FLASHMOE_TRY(check_same_device("logits", *given, "tokens", call.where));
  FLASHMOE_TRY(
      check_extent("logits", "number of tokens", logits.shape[0], "tokens", tokens.shape[0]));
  *experts = logits.shape[1];
  FLASHMOE_TRY(check_experts("logits", *experts));
  // Weights of fp64 multiply only fp64 rows.
  Dtype of_logits;
  return dtype == Dtype::kFloat64 ? check_float_dtype("logits", *given, call.where, &of_logits)
                                  : check_dtype("logits", *given, &of_logits);
}

// Reads the number of experts from the router's weights, the logits or the layer's weights.
flashmoe_status read_experts(const View& tokens, Dtype dtype, Call* call, int64_t* experts) {
  if (call->with_product) {
    FLASHMOE_TRY(read_router(tokens, dtype, call));
    *experts = call->product.out_columns;
  } else {
    FLASHMOE_TRY(check_logits(*call, tokens, dtype, experts));
  }
  const flashmoe_tensor* const held = call->params.w_gate_up;
  if (held == nullptr || held->ndim != 3 || held->shape == nullptr) {
    return FLASHMOE_OK;  // the layer's checks will report it
  }
  return check_extent(call->with_product ? "router_weights" : "logits", "number of experts",
                      *experts, "w_gate_up", held->shape[0]);
}

void lay_out(int64_t tokens, int64_t experts, Call* call) {
  const int64_t pairs = tokens * call->params.top_k;
  const flashmoe_tensor& scored = call->with_product ? *call->params.tokens : *call->params.logits;
  call->wide_weights = scored.dtype.bits == 8 * sizeof(double);
  int64_t used = 0;
  const auto add = [&used](int64_t count, int64_t bytes) {
    const int64_t begin = used;
    used += (count * bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
    return begin;
  };
  constexpr int64_t kIndexBytes = sizeof(int32_t);
  Between& between = call->between;
  if (call->with_product) between.logits = add(tokens * experts, scored.dtype.bits / 8);
  between.ids = add(pairs, kIndexBytes);
  between.weights = add(pairs, call->wide_weights ? sizeof(double) : sizeof(float));
  between.offsets = add(experts + 1, kIndexBytes);
  between.pairs = add(pairs, kIndexBytes);
  between.slots = add(pairs, kIndexBytes);
  between.bytes = used;
}

// Validation and plans precede the call's workspace. They use this address for it.
char* const kNowhere = reinterpret_cast<char*>(uintptr_t{kRegionAlignment});

// Sets the addresses of the intermediates in the problems.
void place(char* workspace, Call* call) {
  const Between& between = call->between;
  MoeRouteProblem& route = call->route;
  MoeForwardProblem& forward = call->forward;
  const auto indices = [workspace](int64_t at) {
    return reinterpret_cast<int32_t*>(workspace + at);
  };
  if (call->with_product) route.logits = call->product.out.data = workspace + between.logits;
  route.ids = indices(between.ids);
  if (call->wide_weights) {
    route.wide_weights = reinterpret_cast<double*>(workspace + between.weights);
    forward.wide_weights = route.wide_weights;
  } else {
    route.weights = reinterpret_cast<float*>(workspace + between.weights);
    forward.weights = route.weights;
  }
  forward.offsets = route.offsets = indices(between.offsets);
  forward.pairs = route.pairs = indices(between.pairs);
  forward.slots = route.slots = indices(between.slots);
}

// Checks what a product requires beyond a layer and a router.
flashmoe_status check_product(const View& tokens, Dtype dtype, Call* call) {
  FLASHMOE_TRY(check_rows("tokens", tokens, 2, dtype_bytes(dtype)));
  const flashmoe_tensor* const bias = call->params.router_bias;
  if (bias == nullptr) return FLASHMOE_OK;
  View view;
  Dtype bias_dtype;
  FLASHMOE_TRY(check_view("router_bias", bias, 1, &view));
  FLASHMOE_TRY(check_same_device("router_bias", *bias, "tokens", call->where));
  FLASHMOE_TRY(check_same_dtype_or_fp32("router_bias", *bias, "tokens", dtype, &bias_dtype));
  FLASHMOE_TRY(check_last_stride("router_bias", view, 1));
  FLASHMOE_TRY(check_alignment("router_bias", view, static_cast<size_t>(dtype_bytes(bias_dtype))));
  call->product.bias = {view.data, 0, 1, bias_dtype, 0};
  return FLASHMOE_OK;
}

flashmoe_status make_route(int64_t experts, Call* call) {
  const FusedMoe::Params& given = call->params;
  flashmoe_moe_route_params& route = call->route_params;
  route = flashmoe_moe_route_params_init();
  route.selection_bias = given.selection_bias;
  route.scoring = given.scoring;
  route.renormalize = given.renormalize;
  route.num_groups = given.num_groups;
  route.top_groups = given.top_groups;
  route.scale = given.scale;
  clear(&call->route);
  call->route.top_k = given.top_k;
  if (!call->with_product) {
    route.logits = given.logits;
    return MoeRoute::read_inputs(route, &call->route, "logits");
  }
  const int64_t shape[] = {call->product.rows, experts};
  flashmoe_tensor logits = *given.tokens;
  logits.data = kNowhere;
  logits.byte_offset = 0;
  logits.shape = shape;
  logits.strides = nullptr;
  route.logits = &logits;
  const flashmoe_status status = MoeRoute::read_inputs(route, &call->route, "router_weights");
  route.logits = nullptr;
  return status;
}

flashmoe_status make_forward(Call* call) {
  const FusedMoe::Params& given = call->params;
  flashmoe_moe_forward_params& forward = call->forward_params;
  forward = flashmoe_moe_forward_params_init();
  forward.x = given.tokens;
  forward.w_gate_up = given.w_gate_up;
  forward.w_up = given.w_up;
  forward.w_down = given.w_down;
  forward.b_gate_up = given.b_gate_up;
  forward.b_up = given.b_up;
  forward.b_down = given.b_down;
  forward.out = given.out;
  forward.gate = given.gate;
  forward.activation = given.activation;
  forward.alpha = given.alpha;
  forward.limit = given.limit;
  forward.up_offset = given.up_offset;
  forward.weight_on_input = given.weight_on_input;
  forward.kernel = given.kernel;
  clear(&call->forward);
  call->forward.top_k = given.top_k;
  FLASHMOE_TRY(MoeForward::read_layer(forward, &call->forward, "tokens"));
  return MoeForward::read_outputs(forward, &call->forward, "tokens");
}

flashmoe_status make_call(const FusedMoe::Params* given, Call* call) {
  FLASHMOE_TRY(read_params(FusedMoe::kParams, given, sizeof *given, &call->params));
  const FusedMoe::Params& params = call->params;
  FLASHMOE_TRY(check_sources(params));
  call->with_product = params.router_weights != nullptr;
  View tokens;
  Dtype dtype;
  FLASHMOE_TRY(check_view("tokens", params.tokens, 2, &tokens));
  FLASHMOE_TRY(check_device("tokens", *params.tokens, &call->where));
  FLASHMOE_TRY(check_first_dtype("tokens", *params.tokens, call->where, &dtype));
  FLASHMOE_TRY(check_multiple("tokens", "hidden size", tokens.shape[1]));
  int64_t experts = 0;
  FLASHMOE_TRY(read_experts(tokens, dtype, call, &experts));
  FLASHMOE_TRY(check_top_k_of(params.top_k, experts));
  FLASHMOE_TRY(check_pairs("tokens", tokens.shape[0], params.top_k));
  lay_out(tokens.shape[0], experts, call);
  if (call->with_product) FLASHMOE_TRY(check_product(tokens, dtype, call));
  FLASHMOE_TRY(make_route(experts, call));
  FLASHMOE_TRY(make_forward(call));
  place(kNowhere, call);
  return FLASHMOE_OK;
}

// ---- plans and launches
// ---------------------------------------------------------------------------

// One of the operations and its plan. Without a router's product that step is empty.
template <class Operation>
struct Step {
  const Family<typename Operation::Problem>* family;
  const Plan* plan;
};

// Calls work(product, route, forward) with the planned steps of a call.
template <class Work>
flashmoe_status with_steps(const Call& call, const Work& work) {
  const auto with_rest = [&](const Step<GroupedProduct>& product) {
    return with_plan<MoeRoute>(call.route, [&](const auto& route, const Plan& route_plan) {
      return with_plan<MoeForward>(call.forward, [&](const auto& forward, const Plan& plan) {
        return work(product, Step<MoeRoute>{&route, &route_plan},
                    Step<MoeForward>{&forward, &plan});
      });
    });
  };
  if (!call.with_product) return with_rest({});
  return with_plan<GroupedProduct>(call.product, [&](const auto& product, const Plan& plan) {
    return with_rest({&product, &plan});
  });
}

// Bytes of workspace of a whole call: `planned`, which its query returns, and `least`, which
// suffices with fewer threads.
struct Needs {
  uint64_t planned = 0;
  uint64_t least = 0;

  template <class Operation>
  void add(const Step<Operation>& step) {
    if (step.plan == nullptr) return;
    const uint64_t bytes = step.plan->info.workspace_bytes;
    planned = std::max(planned, bytes);
    least = std::max(least, step.plan->room.least != 0 ? step.plan->room.least : bytes);
  }
};

Needs needs_of(const Call& call, const Step<GroupedProduct>& product, const Step<MoeRoute>& route,
               const Step<MoeForward>& forward) {
  Needs needs;
  needs.add(product);
  needs.add(route);
  needs.add(forward);
  needs.planned += static_cast<uint64_t>(call.between.bytes);
  needs.least += static_cast<uint64_t>(call.between.bytes);
  return needs;
}

template <class Operation>
void append(const Step<Operation>& step, const typename Operation::Problem& problem,
            flashmoe_plan* all) {
  if (step.plan == nullptr) return;
  const flashmoe_plan& plan = step.plan->info;
  for (int32_t i = 0; i < plan.launch_count; ++i) {
    all->launches[all->launch_count++] = plan.launches[i];
  }
  all->microseconds += plan.microseconds;
  all->flops += Operation::flops(problem);
}

// The plan of the whole call, under the layer's family.
void join(const Call& call, const Step<GroupedProduct>& product, const Step<MoeRoute>& route,
          const Step<MoeForward>& forward, flashmoe_plan* all) {
  *all = flashmoe_plan_init();
  std::snprintf(all->operation, sizeof all->operation, "%s", FusedMoe::kName);
  append(product, call.product, all);
  append(route, call.route, all);
  append(forward, call.forward, all);
  all->bytes = bytes_of<FusedMoe>(call.params);
  all->workspace_bytes = needs_of(call, product, route, forward).planned;
  std::memcpy(all->family, forward.plan->info.family, sizeof all->family);
  std::memcpy(all->isa, forward.plan->info.isa, sizeof all->isa);
  std::memcpy(all->rejected, forward.plan->info.rejected, sizeof all->rejected);
}

flashmoe_status plan_call(const Call& call, flashmoe_plan* all) {
  Plan plans[3];
  Step<GroupedProduct> product = {};
  Step<MoeRoute> route = {nullptr, &plans[1]};
  Step<MoeForward> forward = {nullptr, &plans[2]};
  if (call.with_product) {
    product.plan = &plans[0];
    FLASHMOE_TRY(make_plan<GroupedProduct>(call.product, false, &product.family, &plans[0]));
  }
  FLASHMOE_TRY(make_plan<MoeRoute>(call.route, false, &route.family, &plans[1]));
  FLASHMOE_TRY(make_plan<MoeForward>(call.forward, true, &forward.family, &plans[2]));
  join(call, product, route, forward, all);
  return FLASHMOE_OK;
}

void log_fused(const Call& call, const flashmoe_plan& plan, const void* stream) {
  char route[512];
  char forward[512];
  char text[1088];
  MoeRoute::print(call.route_params, call.route, route, sizeof route);
  MoeForward::print(call.forward_params, call.forward, forward, sizeof forward);
  std::snprintf(text, sizeof text, "router=%s %s; %s", call.with_product ? "yes" : "no", route,
                forward);
  log_call(FusedMoe::kName, text, call.where, plan, stream);
}

// Fits a step into `bytes` with fewer threads; `fitted` then holds its plan.
template <class Operation>
void fit(uint64_t bytes, Step<Operation>* step, Plan* fitted) {
  if (step->plan == nullptr || step->plan->room.least == 0) return;
  *fitted = *step->plan;
  fitted->fit_threads(bytes);
  step->plan = fitted;
}

// Launches the steps, fitted to the workspace.
flashmoe_status launch(Call* call, const Step<GroupedProduct>& product, const Step<MoeRoute>& route,
                       const Step<MoeForward>& forward, void* workspace, void* stream) {
#if FLASHMOE_WITH_CUDA
  if (call->with_product && is_on_cuda(call->where)) {
    FLASHMOE_TRY(cuda_all_rows(call->where.device_id, &call->product.offsets));
  }
#endif
  place(static_cast<char*>(workspace), call);
  begin_launches();
  void* const rest = static_cast<char*>(workspace) + call->between.bytes;
  if (call->with_product) {
    FLASHMOE_TRY(product.family->launch(call->product, *product.plan, rest, stream));
  }
  FLASHMOE_TRY(route.family->launch(call->route, *route.plan, rest, stream));
  return forward.family->launch(call->forward, *forward.plan, rest, stream);
}

flashmoe_status run(Call* call, void* workspace, size_t workspace_size, void* stream) {
  return with_steps(
      *call, [&](Step<GroupedProduct> product, Step<MoeRoute> route, Step<MoeForward> forward) {
        const Needs needs = needs_of(*call, product, route, forward);
        const uint64_t used = workspace_size < needs.least
                                  ? needs.planned
                                  : std::min<uint64_t>(needs.planned, workspace_size);
        FLASHMOE_TRY(
            check_memory<FusedMoe>(call->params, call->where, used, workspace, workspace_size));
        Plan fitted[3];
        const uint64_t rest = used - static_cast<uint64_t>(call->between.bytes);
        fit(rest, &product, &fitted[0]);
        fit(rest, &route, &fitted[1]);
        fit(rest, &forward, &fitted[2]);
        if (log_enabled(FLASHMOE_LOG_INFO)) {
          flashmoe_plan plan;
          join(*call, product, route, forward, &plan);
          log_fused(*call, plan, stream);
        }
        if (MoeForward::is_empty(call->forward)) return FLASHMOE_OK;
        return launch(call, product, route, forward, workspace, stream);
      });
}

}  // namespace
}  // namespace flashmoe

using flashmoe::Call;
using flashmoe::fail;
using flashmoe::FusedMoe;

flashmoe_status flashmoe_fused_moe_plan(const flashmoe_fused_moe_params* params,
                                        flashmoe_plan* plan) {
  if (plan == nullptr) return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "plan: got a null pointer");
  FLASHMOE_TRY(
      flashmoe::check_struct_size("flashmoe_plan", plan->struct_size, sizeof *plan, sizeof *plan));
  Call call;
  FLASHMOE_TRY(flashmoe::make_call(params, &call));
  flashmoe_plan made;
  FLASHMOE_TRY(flashmoe::plan_call(call, &made));
  flashmoe::copy_out(made, plan);
  return FLASHMOE_OK;
}

flashmoe_status flashmoe_fused_moe_workspace_size(const flashmoe_fused_moe_params* params,
                                                  size_t* bytes) {
  if (bytes == nullptr) return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "bytes: got a null pointer");
  Call call;
  FLASHMOE_TRY(flashmoe::make_call(params, &call));
  return flashmoe::with_steps(call, [&](const auto&... steps) {
    *bytes = static_cast<size_t>(flashmoe::needs_of(call, steps...).planned);
    return FLASHMOE_OK;
  });
}

flashmoe_status flashmoe_fused_moe(const flashmoe_fused_moe_params* params, void* workspace,
                                   size_t workspace_size, void* stream) {
  Call call;
  FLASHMOE_TRY(flashmoe::make_call(params, &call));
  FLASHMOE_TRY(flashmoe::check_runs_here<FusedMoe>(call.params, call.where));
  return flashmoe::run(&call, workspace, workspace_size, stream);
}
