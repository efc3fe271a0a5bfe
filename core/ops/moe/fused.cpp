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
constexpr int32_t kAllRows[2] = {
    0, INT32_MAX};  // of a product of one expert: cut to the rows there are
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kFloat64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};

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

// A tensor and what it points to.
struct OwnTensor {
  flashmoe_tensor tensor;
  int64_t shape[3];
  int64_t strides[3];

  const flashmoe_tensor* get() const { return &tensor; }
};

void describe(OwnTensor* own, void* data, flashmoe_device device, flashmoe_dtype dtype,
              std::initializer_list<int64_t> shape) {
  own->tensor = {};
  own->tensor.data = data;
  own->tensor.device = device;
  own->tensor.dtype = dtype;
  own->tensor.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), own->shape);
  own->tensor.shape = own->shape;
}

// A checked tensor of one or two dimensions, as the only one along a new first axis.
void add_axis(const flashmoe_tensor& given, OwnTensor* own) {
  own->tensor = given;
  own->tensor.ndim = given.ndim + 1;
  own->shape[0] = 1;
  own->strides[0] = 0;
  int64_t packed = 1;
  for (int32_t axis = given.ndim - 1; axis >= 0; --axis) {
    own->shape[axis + 1] = given.shape[axis];
    own->strides[axis + 1] = given.strides != nullptr ? given.strides[axis] : packed;
    packed *= given.shape[axis];
  }
  own->tensor.shape = own->shape;
  own->tensor.strides = own->strides;
}

// One call: its three operations, and what is between them.
struct Call {
  FusedMoe::Params params;
  flashmoe_device device;  // as it was given
  flashmoe_device where;   // as problems have it
  bool with_product;
  bool wide_weights;
  int64_t bytes;  // of the workspace, for what is between the operations

  OwnTensor router_weights, router_bias, all_rows;
  OwnTensor logits, ids, weights, offsets, pairs, slots;  // see lay_out()
  GroupedProductProblem product;
  MoeRouteProblem route;
  MoeForwardProblem forward;
  flashmoe_moe_route_params route_params;
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

// What the grouped product would say of tensors that the caller did not give: its weights have an
// axis more than a router's.
flashmoe_status check_router(const Call& call, const View& tokens, Dtype dtype, int64_t* experts) {
  const FusedMoe::Params& params = call.params;
  constexpr char kName[] = "router_weights";
  View weights;
  FLASHMOE_TRY(check_view(kName, params.router_weights, 2, &weights));
  FLASHMOE_TRY(check_same_device(kName, *params.router_weights, "tokens", call.where));
  FLASHMOE_TRY(check_same_dtype(kName, *params.router_weights, "tokens", dtype));
  *experts = weights.shape[0];
  FLASHMOE_TRY(check_experts(kName, *experts));
  if (*experts % kExtentMultiple != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got %lld experts, accepted are multiples of %lld, or logits in its place",
                kName, static_cast<long long>(*experts), static_cast<long long>(kExtentMultiple));
  }
  FLASHMOE_TRY(
      check_extent(kName, "number of columns", weights.shape[1], "tokens", tokens.shape[1]));
  FLASHMOE_TRY(check_matrix_layout(kName, weights, 2, dtype_bytes(dtype)));
  if (params.router_bias == nullptr) return FLASHMOE_OK;
  View bias;
  FLASHMOE_TRY(check_view("router_bias", params.router_bias, 1, &bias));
  return check_extent("router_bias", "number of experts", bias.shape[0], kName, *experts);
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
  // Weights of fp64 multiply rows of fp64 alone.
  Dtype of_logits;
  return dtype == Dtype::kFloat64 ? check_float_dtype("logits", *given, call.where, &of_logits)
                                  : check_dtype("logits", *given, &of_logits);
}

// The number of experts, which a router's weights or logits tell, and the layer's weights too.
flashmoe_status read_experts(const Call& call, const View& tokens, Dtype dtype, int64_t* experts) {
  FLASHMOE_TRY(call.with_product ? check_router(call, tokens, dtype, experts)
                                 : check_logits(call, tokens, dtype, experts));
  const flashmoe_tensor* const held = call.params.w_gate_up;
  if (held == nullptr || held->ndim != 3 || held->shape == nullptr) {
    return FLASHMOE_OK;  // the layer's checks tell
  }
  return check_extent(call.with_product ? "router_weights" : "logits", "number of experts",
                      *experts, "w_gate_up", held->shape[0]);
}

// Lays out what is between the operations. Validation and plans come before the call's workspace,
// so that addresses count from kNowhere: place() gives those of a launch.
char* const kNowhere = reinterpret_cast<char*>(uintptr_t{kRegionAlignment});

void lay_out(int64_t tokens, int64_t experts, Call* call) {
  const int64_t top_k = call->params.top_k;
  const flashmoe_tensor& scored = call->with_product ? *call->params.tokens : *call->params.logits;
  call->wide_weights = scored.dtype.bits == kFloat64.bits;
  int64_t used = 0;
  const auto add = [&](OwnTensor* own, flashmoe_dtype dtype, std::initializer_list<int64_t> shape) {
    describe(own, kNowhere + used, call->device, dtype, shape);
    int64_t bytes = dtype.bits / 8;
    for (const int64_t extent : shape) bytes *= extent;
    used += (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  };
  if (call->with_product) add(&call->logits, call->params.tokens->dtype, {tokens, experts});
  add(&call->ids, kInt32, {tokens, top_k});
  add(&call->weights, call->wide_weights ? kFloat64 : kFloat32, {tokens, top_k});
  add(&call->offsets, kInt32, {experts + 1});
  add(&call->pairs, kInt32, {tokens * top_k});
  add(&call->slots, kInt32, {tokens, top_k});
  call->bytes = used;
}

void place(void* workspace, Call* call) {
  const auto at = [workspace](const OwnTensor& own) -> void* {
    return static_cast<char*>(workspace) + (static_cast<char*>(own.tensor.data) - kNowhere);
  };
  MoeRouteProblem& route = call->route;
  MoeForwardProblem& forward = call->forward;
  if (call->with_product) route.logits = call->product.out.data = at(call->logits);
  route.ids = static_cast<int32_t*>(at(call->ids));
  if (call->wide_weights) {
    forward.wide_weights = route.wide_weights = static_cast<double*>(at(call->weights));
  } else {
    forward.weights = route.weights = static_cast<float*>(at(call->weights));
  }
  forward.offsets = route.offsets = static_cast<int32_t*>(at(call->offsets));
  forward.pairs = route.pairs = static_cast<int32_t*>(at(call->pairs));
  forward.slots = route.slots = static_cast<int32_t*>(at(call->slots));
}

flashmoe_status make_product(Call* call) {
  const FusedMoe::Params& given = call->params;
  describe(&call->all_rows, const_cast<int32_t*>(kAllRows), call->device, kInt32, {2});
  add_axis(*given.router_weights, &call->router_weights);
  flashmoe_grouped_product_params product = flashmoe_grouped_product_params_init();
  product.x = given.tokens;
  product.w = call->router_weights.get();
  if (given.router_bias != nullptr) {
    add_axis(*given.router_bias, &call->router_bias);
    product.bias = call->router_bias.get();
  }
  product.offsets = call->all_rows.get();
  product.out = call->logits.get();
  clear(&call->product);
  return GroupedProduct::make_problem(product, &call->product,
                                      {"tokens", "router_weights", "router_bias"});
}

flashmoe_status make_route(Call* call) {
  const FusedMoe::Params& given = call->params;
  flashmoe_moe_route_params& route = call->route_params;
  route = flashmoe_moe_route_params_init();
  route.logits = call->with_product ? call->logits.get() : given.logits;
  route.selection_bias = given.selection_bias;
  route.ids = call->ids.get();
  route.weights = call->weights.get();
  route.offsets = call->offsets.get();
  route.pairs = call->pairs.get();
  route.slots = call->slots.get();
  route.scoring = given.scoring;
  route.renormalize = given.renormalize;
  route.num_groups = given.num_groups;
  route.top_groups = given.top_groups;
  route.scale = given.scale;
  clear(&call->route);
  return MoeRoute::make_problem(route, &call->route,
                                call->with_product ? "router_weights" : "logits");
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
  forward.weights = call->weights.get();
  forward.offsets = call->offsets.get();
  forward.pairs = call->pairs.get();
  forward.slots = call->slots.get();
  forward.out = given.out;
  forward.gate = given.gate;
  forward.activation = given.activation;
  forward.alpha = given.alpha;
  forward.limit = given.limit;
  forward.up_offset = given.up_offset;
  forward.weight_on_input = given.weight_on_input;
  forward.kernel = given.kernel;
  clear(&call->forward);
  return MoeForward::make_problem(forward, &call->forward, "tokens");
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
  call->device = params.tokens->device;
  int64_t experts = 0;
  FLASHMOE_TRY(read_experts(*call, tokens, dtype, &experts));
  FLASHMOE_TRY(check_top_k_of(params.top_k, experts));
  FLASHMOE_TRY(check_pairs("tokens", tokens.shape[0], params.top_k));
  lay_out(tokens.shape[0], experts, call);
  if (call->with_product) FLASHMOE_TRY(make_product(call));
  FLASHMOE_TRY(make_route(call));
  return make_forward(call);
}

// ---- plans and launches
// ---------------------------------------------------------------------------

// One of the operations, and how it is computed. Without a router's product that step is empty.
template <class Operation>
struct Step {
  const Family<typename Operation::Problem>* family;
  const Plan* plan;
};

// Does work(product, route, forward), the planned steps of a call.
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

// Bytes of workspace of a whole call: `planned`, which its query tells, and `least`, which it can
// do with by fewer threads.
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
  needs.planned += static_cast<uint64_t>(call.bytes);
  needs.least += static_cast<uint64_t>(call.bytes);
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

// The plan of the whole call, of the layer's family.
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

// Has a step make do with `bytes`, by fewer threads; `fitted` is where its plan is then.
template <class Operation>
void fit(uint64_t bytes, Step<Operation>* step, Plan* fitted) {
  if (step->plan == nullptr || step->plan->room.least == 0) return;
  *fitted = *step->plan;
  fitted->fit_threads(bytes);
  step->plan = fitted;
}

// With the steps fitted to the workspace.
flashmoe_status launch(Call* call, const Step<GroupedProduct>& product, const Step<MoeRoute>& route,
                       const Step<MoeForward>& forward, void* workspace, void* stream) {
#if FLASHMOE_WITH_CUDA
  if (call->with_product && is_on_cuda(call->where)) {
    FLASHMOE_TRY(cuda_all_rows(call->where.device_id, &call->product.offsets));
  }
#endif
  place(workspace, call);
  begin_launches();
  void* const rest = static_cast<char*>(workspace) + call->bytes;
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
        const uint64_t rest = used - static_cast<uint64_t>(call->bytes);
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
