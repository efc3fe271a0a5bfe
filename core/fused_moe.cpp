// The router's product, routing and the layer in one call: three operations whose intermediates lie in the
// call's workspace.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/moe_checks.h"
#include "core/moe_operations.h"

namespace flashmoe {
namespace {

constexpr int64_t kRegionAlignment = 256;
constexpr int32_t kAllRows[2] = {
    0, INT32_MAX};  // of a product of one expert: cut to the rows there are
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};

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

// A tensor of one dimension less, as the only one along a new first axis.
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
  int64_t bytes;  // of the workspace, for what is between the operations

  OwnTensor router_weights, router_bias, all_rows;
  OwnTensor logits, ids, weights, offsets, pairs, slots;
  flashmoe_grouped_product_params product_params;
  flashmoe_moe_route_params route_params;
  flashmoe_moe_forward_params forward_params;
  GroupedProductProblem product;
  MoeRouteProblem route;
  MoeForwardProblem forward;
};

flashmoe_status check_top_k_of(int32_t top_k, int64_t experts) {
  const int64_t most = std::min(experts, kMaxTopK);
  if (top_k >= 1 && top_k <= most) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "top_k: got %d, accepted are 1 to %lld", top_k,
              static_cast<long long>(most));
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

// The number of experts, which a router's weights or logits tell.
flashmoe_status read_experts(const Call& call, int64_t tokens, int64_t* experts) {
  const FusedMoe::Params& params = call.params;
  View view;
  const char* const name = call.with_product ? "router_weights" : "logits";
  FLASHMOE_TRY(
      check_view(name, call.with_product ? params.router_weights : params.logits, 2, &view));
  *experts = view.shape[call.with_product ? 0 : 1];
  FLASHMOE_TRY(check_experts(name, *experts));
  if (call.with_product && *experts % kExtentMultiple != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "router_weights: got %lld experts, accepted are multiples of %lld, or logits in "
                "their place",
                static_cast<long long>(*experts), static_cast<long long>(kExtentMultiple));
  }
  if (!call.with_product) {
    FLASHMOE_TRY(check_extent("logits", "number of tokens", view.shape[0], "tokens", tokens));
  }
  if (params.w_gate_up == nullptr || params.w_gate_up->ndim != 3 ||
      params.w_gate_up->shape == nullptr) {
    return FLASHMOE_OK;  // the layer's checks tell
  }
  return check_extent(name, "number of experts", *experts, "w_gate_up", params.w_gate_up->shape[0]);
}

// Lays out what is between the operations from `base` on.
void lay_out(char* base, int64_t tokens, int64_t experts, Call* call) {
  const int64_t top_k = call->params.top_k;
  int64_t used = 0;
  const auto add = [&](OwnTensor* own, flashmoe_dtype dtype, std::initializer_list<int64_t> shape) {
    describe(own, base + used, call->device, dtype, shape);
    int64_t bytes = dtype.bits / 8;
    for (const int64_t extent : shape) bytes *= extent;
    used += (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  };
  if (call->with_product) add(&call->logits, call->params.tokens->dtype, {tokens, experts});
  add(&call->ids, kInt32, {tokens, top_k});
  add(&call->weights, kFloat32, {tokens, top_k});
  add(&call->offsets, kInt32, {experts + 1});
  add(&call->pairs, kInt32, {tokens * top_k});
  add(&call->slots, kInt32, {tokens, top_k});
  call->bytes = used;
}

void fill_params(const int32_t* all_rows, Call* call) {
  const FusedMoe::Params& given = call->params;
  call->route_params = flashmoe_moe_route_params_init();
  call->forward_params = flashmoe_moe_forward_params_init();
  if (call->with_product) {
    call->product_params = flashmoe_grouped_product_params_init();
    describe(&call->all_rows, const_cast<int32_t*>(all_rows), call->device, kInt32, {2});
    add_axis(*given.router_weights, &call->router_weights);
    if (given.router_bias != nullptr) add_axis(*given.router_bias, &call->router_bias);
    flashmoe_grouped_product_params& product = call->product_params;
    product.x = given.tokens;
    product.w = call->router_weights.get();
    product.bias = given.router_bias != nullptr ? call->router_bias.get() : nullptr;
    product.offsets = call->all_rows.get();
    product.out = call->logits.get();
  }
  flashmoe_moe_route_params& route = call->route_params;
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
  flashmoe_moe_forward_params& forward = call->forward_params;
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
}

flashmoe_status find_all_rows(flashmoe_device device, const int32_t** offsets) {
  *offsets = kAllRows;  // of a model nothing is read
#if FLASHMOE_WITH_CUDA
  if (is_on_cuda(device) && !is_gpu_model(device.device_id)) {
    return cuda_all_rows(device.device_id, offsets);
  }
#else
  static_cast<void>(device);
#endif
  return FLASHMOE_OK;
}

// Validates a call whose workspace is, or is to be, at `workspace`.
flashmoe_status make_call(const FusedMoe::Params* given, void* workspace, Call* call) {
  FLASHMOE_TRY(read_params(FusedMoe::kParams, given, sizeof *given, &call->params));
  const FusedMoe::Params& params = call->params;
  FLASHMOE_TRY(check_sources(params));
  call->with_product = params.router_weights != nullptr;
  View tokens;
  FLASHMOE_TRY(check_view("tokens", params.tokens, 2, &tokens));
  Dtype dtype;
  FLASHMOE_TRY(check_device("tokens", *params.tokens, &call->where));
  FLASHMOE_TRY(check_first_dtype("tokens", *params.tokens, call->where, &dtype));
  call->device = params.tokens->device;
  int64_t experts = 0;
  FLASHMOE_TRY(read_experts(*call, tokens.shape[0], &experts));
  FLASHMOE_TRY(check_top_k_of(params.top_k, experts));
  FLASHMOE_TRY(check_pairs("tokens", tokens.shape[0], params.top_k));
  FLASHMOE_TRY(check_pair_rows("tokens", tokens.shape[0], experts));
  lay_out(static_cast<char*>(workspace), tokens.shape[0], experts, call);
  const int32_t* all_rows = nullptr;
  FLASHMOE_TRY(find_all_rows(call->where, &all_rows));
  fill_params(all_rows, call);
  clear(&call->product);
  clear(&call->route);
  clear(&call->forward);
  if (call->with_product) {
    FLASHMOE_TRY(GroupedProduct::make_problem(call->product_params, &call->product,
                                              {"tokens", "router_weights", "router_bias"}));
  }
  FLASHMOE_TRY(MoeRoute::make_problem(call->route_params, &call->route,
                                      call->with_product ? "router_weights" : "logits"));
  return MoeForward::make_problem(call->forward_params, &call->forward, "tokens");
}

// Appends the launches of one operation, and adds up what the others need and take.
void append(const flashmoe_plan& plan, flashmoe_plan* all) {
  for (int32_t i = 0; i < plan.launch_count; ++i) {
    all->launches[all->launch_count++] = plan.launches[i];
  }
  all->workspace_bytes = std::max(all->workspace_bytes, plan.workspace_bytes);
  all->microseconds += plan.microseconds;
}

flashmoe_status plan_fused(const Call& call, bool explain, flashmoe_plan* all) {
  *all = flashmoe_plan_init();
  std::snprintf(all->operation, sizeof all->operation, "%s", FusedMoe::kName);
  if (call.with_product) {
    Plan plan;
    const GroupedProductFamily* family;
    FLASHMOE_TRY(make_plan<GroupedProduct>(call.product, false, &family, &plan));
    append(plan.info, all);
    all->flops += GroupedProduct::flops(call.product);
  }
  {
    Plan plan;
    const MoeRouteFamily* family;
    FLASHMOE_TRY(make_plan<MoeRoute>(call.route, false, &family, &plan));
    append(plan.info, all);
  }
  Plan plan;
  const MoeForwardFamily* family;
  FLASHMOE_TRY(make_plan<MoeForward>(call.forward, explain, &family, &plan));
  append(plan.info, all);
  all->flops += MoeForward::flops(call.forward);
  all->bytes = bytes_of<FusedMoe>(call.params);
  all->workspace_bytes += static_cast<uint64_t>(call.bytes);
  std::memcpy(all->family, plan.info.family, sizeof all->family);
  std::memcpy(all->isa, plan.info.isa, sizeof all->isa);
  std::memcpy(all->rejected, plan.info.rejected, sizeof all->rejected);
  return FLASHMOE_OK;
}

// One operation of a call, in what its intermediates leave of the workspace.
template <class Operation>
flashmoe_status launch(const typename Operation::Problem& problem, void* workspace,
                       uint64_t workspace_size, void* stream) {
  return with_plan<Operation>(problem, [&](const auto& family, const Plan& plan) {
    if (plan.room.least == 0) return family.launch(problem, plan, workspace, stream);
    Plan fitted = plan;
    fitted.fit_threads(workspace_size);
    return family.launch(problem, fitted, workspace, stream);
  });
}

// Bytes of workspace that an operation can do with: on the CPU, one thread's are enough.
template <class Operation>
flashmoe_status least_workspace(const typename Operation::Problem& problem, uint64_t* bytes) {
  return with_plan<Operation>(problem, [&](const auto&, const Plan& plan) {
    const uint64_t least = plan.room.least != 0 ? plan.room.least : plan.info.workspace_bytes;
    *bytes = std::max(*bytes, std::min(least, plan.info.workspace_bytes));
    return FLASHMOE_OK;
  });
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

flashmoe_status run(const Call& call, void* workspace, size_t workspace_size, void* stream) {
  uint64_t needed = 0;
  if (call.with_product) FLASHMOE_TRY(least_workspace<GroupedProduct>(call.product, &needed));
  FLASHMOE_TRY(least_workspace<MoeRoute>(call.route, &needed));
  FLASHMOE_TRY(least_workspace<MoeForward>(call.forward, &needed));
  needed += static_cast<uint64_t>(call.bytes);
  const size_t alignment = is_on_cuda(call.where) ? FusedMoe::kGpuAlignment : kCpuAlignment;
  FLASHMOE_TRY(
      check_workspace(needed, workspace, workspace_size, alignment, FusedMoe::kSizeFunction));
  FLASHMOE_TRY(check_apart<FusedMoe>(call.params, workspace,
                                     is_on_cuda(call.where) ? needed : workspace_size));
  if (log_enabled(FLASHMOE_LOG_INFO)) {
    flashmoe_plan plan;
    FLASHMOE_TRY(plan_fused(call, log_enabled(FLASHMOE_LOG_DEBUG), &plan));
    log_fused(call, plan, stream);
  }
  if (MoeForward::is_empty(call.forward)) return FLASHMOE_OK;
  begin_launches();
  void* const rest = static_cast<char*>(workspace) + call.bytes;
  const uint64_t rest_bytes = workspace_size - static_cast<uint64_t>(call.bytes);
  if (call.with_product) {
    FLASHMOE_TRY(launch<GroupedProduct>(call.product, rest, rest_bytes, stream));
  }
  FLASHMOE_TRY(launch<MoeRoute>(call.route, rest, rest_bytes, stream));
  return launch<MoeForward>(call.forward, rest, rest_bytes, stream);
}

// Where a workspace might be: that of a call that is planned alone, or whose own is refused later.
void* some_workspace() { return reinterpret_cast<void*>(kRegionAlignment); }

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
  FLASHMOE_TRY(flashmoe::make_call(params, flashmoe::some_workspace(), &call));
  flashmoe_plan made;
  FLASHMOE_TRY(flashmoe::plan_fused(call, true, &made));
  flashmoe::copy_out(made, plan);
  return FLASHMOE_OK;
}

flashmoe_status flashmoe_fused_moe_workspace_size(const flashmoe_fused_moe_params* params,
                                                  size_t* bytes) {
  if (bytes == nullptr) return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "bytes: got a null pointer");
  Call call;
  FLASHMOE_TRY(flashmoe::make_call(params, flashmoe::some_workspace(), &call));
  flashmoe_plan plan;
  FLASHMOE_TRY(flashmoe::plan_fused(call, false, &plan));
  *bytes = static_cast<size_t>(plan.workspace_bytes);
  return FLASHMOE_OK;
}

flashmoe_status flashmoe_fused_moe(const flashmoe_fused_moe_params* params, void* workspace,
                                   size_t workspace_size, void* stream) {
  Call call;
  const bool usable =
      workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % flashmoe::kCpuAlignment == 0;
  FLASHMOE_TRY(flashmoe::make_call(params, usable ? workspace : flashmoe::some_workspace(), &call));
  FLASHMOE_TRY(flashmoe::check_runs_here<FusedMoe>(call.params, call.where));
  return flashmoe::run(call, workspace, workspace_size, stream);
}
