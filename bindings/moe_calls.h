// The mixture of experts' operations as calls: tensors viewed, parameters of the C ABI, and what the
// ways that lead to them share.
//
// Each operation is a struct; a table names its tensors. It has `params`, ready(&call) of which
// points to the views; kPlan, kWorkspaceSize and kRun of the C ABI; kNeedsWorkspace, whether nearly every call on a
// GPU does; and make_outputs.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/caller.h"
#include "bindings/options.h"
#include "bindings/tensor.h"
#include "bindings/workspace.h"
#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"

namespace flashmoe {

inline constexpr OperationWords kMoeWords = {"the mixture of experts", "all tensors of a call",
                                             "out"};
inline constexpr flashmoe_dtype kInt32 = {dlpack::kInt, 32, 1};
inline constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
inline constexpr int64_t kMaxTopK = 32;
inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxPairs = (int64_t{1} << 31) - (int64_t{1} << 16);

// One tensor of an operation: what Python and messages call it, and where it goes.
template <class Call>
struct Field {
  const char* name;
  TensorView Call::* view;
  const flashmoe_tensor* Call::Params::* param;
  Access access;
};

// Whether kernels take tensors of this dtype.
bool is_float(flashmoe_dtype dtype);

int64_t parse_top_k(nb::handle top_k);

// ---- the operations -----------------------------------------------------------------------------

struct RouteOptions {
  nb::handle scoring;
  nb::handle renormalize;
  nb::handle num_groups;
  nb::handle top_groups;
  nb::handle scale;
};

struct RouteExtents {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;
};

struct RouteCall {
  using Params = flashmoe_moe_route_params;
  static constexpr auto kPlan = &flashmoe_moe_route_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_route_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_route;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_moe_route_params_init();
  TensorView logits;
  TensorView selection_bias;
  TensorView given_ids;
  TensorView given_weights;
  TensorView expert_map;
  TensorView ids;
  TensorView weights;
  TensorView offsets;
  TensorView pairs;
  TensorView slots;
  TensorView lse;

  void parse(const RouteOptions& options) {
    params.scoring = parse_scoring(options.scoring);
    params.num_groups = static_cast<int32_t>(parse_integer(
        "num_groups", options.num_groups, 1, kMaxExperts, "are 1, for none, and divisors of E"));
    if (!options.top_groups.is_none()) {
      params.top_groups =
          static_cast<int32_t>(parse_integer("top_groups", options.top_groups, 1, kMaxExperts,
                                             "are 1 to num_groups, or None without groups"));
    }
    parse_weights(options.renormalize, options.scale);
  }
  // What is done to the scores, be they given.
  void parse_weights(nb::handle renormalize, nb::handle scale) {
    params.renormalize = parse_flag("renormalize", renormalize);
    params.scale = parse_factor("scale", scale);
  }

  const TensorView& first() const { return logits.get() != nullptr ? logits : given_ids; }

  // See ForwardCall.
  template <class Make>
  void make_outputs(const RouteExtents& extents, bool want_lse, const Make& make) {
    const int64_t each[] = {extents.tokens, extents.top_k};
    const int64_t sorted[] = {extents.tokens * extents.top_k};
    const int64_t bounds[] = {extents.experts + 1};
    if (ids.get() == nullptr) make("ids", &ids, kInt32, 2, each);
    if (weights.get() == nullptr) make("weights", &weights, kFloat32, 2, each);
    if (offsets.get() == nullptr) make("offsets", &offsets, kInt32, 1, bounds);
    if (pairs.get() == nullptr) make("pairs", &pairs, kInt32, 1, sorted);
    if (slots.get() == nullptr) make("slots", &slots, kInt32, 2, each);
    if (want_lse && lse.get() == nullptr) make("lse", &lse, kFloat32, 1, &extents.tokens);
  }
};

inline constexpr Field<RouteCall> kRouteFields[] = {
    {"logits", &RouteCall::logits, &RouteCall::Params::logits, Access::kRead},
    {"selection_bias", &RouteCall::selection_bias, &RouteCall::Params::selection_bias,
     Access::kRead},
    {"given_ids", &RouteCall::given_ids, &RouteCall::Params::given_ids, Access::kRead},
    {"given_weights", &RouteCall::given_weights, &RouteCall::Params::given_weights, Access::kRead},
    {"expert_map", &RouteCall::expert_map, &RouteCall::Params::expert_map, Access::kRead},
    {"ids", &RouteCall::ids, &RouteCall::Params::ids, Access::kWrite},
    {"weights", &RouteCall::weights, &RouteCall::Params::weights, Access::kWrite},
    {"offsets", &RouteCall::offsets, &RouteCall::Params::offsets, Access::kWrite},
    {"pairs", &RouteCall::pairs, &RouteCall::Params::pairs, Access::kWrite},
    {"slots", &RouteCall::slots, &RouteCall::Params::slots, Access::kWrite},
    {"lse", &RouteCall::lse, &RouteCall::Params::lse, Access::kWrite},
};

struct ForwardOptions {
  nb::handle gate;
  nb::handle activation;
  nb::handle alpha;
  nb::handle limit;
  nb::handle up_offset;
  nb::handle weight_on_input;
  nb::handle kernel;
};

struct ForwardCall {
  using Params = flashmoe_moe_forward_params;
  static constexpr auto kPlan = &flashmoe_moe_forward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_forward_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_forward;
  static constexpr bool kNeedsWorkspace = true;

  Params params = flashmoe_moe_forward_params_init();
  TensorView x;
  TensorView w_gate_up;
  TensorView w_up;
  TensorView w_down;
  TensorView b_gate_up;
  TensorView b_up;
  TensorView b_down;
  TensorView weights;
  TensorView offsets;
  TensorView pairs;
  TensorView slots;
  TensorView out;
  TensorView pre_activation;

  void parse(const ForwardOptions& options) {
    params.gate = parse_gate(options.gate);
    params.activation = parse_activation(options.activation);
    params.alpha = parse_factor("alpha", options.alpha);
    params.limit = parse_limit(options.limit);
    params.up_offset = parse_number("up_offset", options.up_offset);
    params.weight_on_input = parse_flag("weight_on_input", options.weight_on_input);
    params.kernel = parse_kernel(options.kernel);
  }

  const TensorView& first() const { return x; }

  // Has `make` make the outputs that are not there: make(name, view, dtype, rank, shape). Where the
  // inputs do not tell their shapes, the library says what is wrong. The same below.
  template <class Make>
  void make_outputs(bool want_pre_activation, const Make& make) {
    const flashmoe_dtype dtype = x.tensor().dtype;
    if (!is_float(dtype)) return;
    if (out.get() == nullptr && x.rank() == 2) {
      const int64_t shape[] = {x.extent(0), x.extent(1)};
      make("out", &out, dtype, 2, shape);
    }
    if (!want_pre_activation || pre_activation.get() != nullptr || slots.rank() != 2 ||
        w_gate_up.rank() != 3) {
      return;
    }
    const int64_t tokens = slots.extent(0);
    const int64_t top_k = slots.extent(1);
    if (top_k < 1 || top_k > kMaxTopK || tokens > kMaxPairs / top_k) return;
    const int64_t matrices = params.gate == FLASHMOE_MOE_SEPARATE ? 2 : 1;
    const int64_t shape[] = {tokens * top_k, w_gate_up.extent(1) * matrices};
    make("pre_activation", &pre_activation, dtype, 2, shape);
  }
};

inline constexpr Field<ForwardCall> kForwardFields[] = {
    {"x", &ForwardCall::x, &ForwardCall::Params::x, Access::kRead},
    {"w_gate_up", &ForwardCall::w_gate_up, &ForwardCall::Params::w_gate_up, Access::kRead},
    {"w_up", &ForwardCall::w_up, &ForwardCall::Params::w_up, Access::kRead},
    {"w_down", &ForwardCall::w_down, &ForwardCall::Params::w_down, Access::kRead},
    {"b_gate_up", &ForwardCall::b_gate_up, &ForwardCall::Params::b_gate_up, Access::kRead},
    {"b_up", &ForwardCall::b_up, &ForwardCall::Params::b_up, Access::kRead},
    {"b_down", &ForwardCall::b_down, &ForwardCall::Params::b_down, Access::kRead},
    {"weights", &ForwardCall::weights, &ForwardCall::Params::weights, Access::kRead},
    {"offsets", &ForwardCall::offsets, &ForwardCall::Params::offsets, Access::kRead},
    {"pairs", &ForwardCall::pairs, &ForwardCall::Params::pairs, Access::kRead},
    {"slots", &ForwardCall::slots, &ForwardCall::Params::slots, Access::kRead},
    {"out", &ForwardCall::out, &ForwardCall::Params::out, Access::kWrite},
    {"pre_activation", &ForwardCall::pre_activation, &ForwardCall::Params::pre_activation,
     Access::kWrite},
};

struct ProductCall {
  using Params = flashmoe_grouped_product_params;
  static constexpr auto kPlan = &flashmoe_grouped_product_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_grouped_product_workspace_size;
  static constexpr auto kRun = &flashmoe_grouped_product;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_grouped_product_params_init();
  TensorView x;
  TensorView w;
  TensorView bias;
  TensorView offsets;
  TensorView counts;
  TensorView out;

  const TensorView& first() const { return x; }

  template <class Make>
  void make_outputs(const Make& make) {
    const int rank = x.rank();
    if (out.get() != nullptr || (rank != 2 && rank != 3) || w.rank() != 3 ||
        !is_float(x.tensor().dtype)) {
      return;
    }
    const int64_t shape[] = {x.extent(0), rank == 3 ? x.extent(1) : w.extent(1), w.extent(1)};
    make("out", &out, x.tensor().dtype, rank, shape);
  }
};

inline constexpr Field<ProductCall> kProductFields[] = {
    {"x", &ProductCall::x, &ProductCall::Params::x, Access::kRead},
    {"w", &ProductCall::w, &ProductCall::Params::w, Access::kRead},
    {"bias", &ProductCall::bias, &ProductCall::Params::bias, Access::kRead},
    {"offsets", &ProductCall::offsets, &ProductCall::Params::offsets, Access::kRead},
    {"counts", &ProductCall::counts, &ProductCall::Params::counts, Access::kRead},
    {"out", &ProductCall::out, &ProductCall::Params::out, Access::kWrite},
};

// Arguments have the same names in C and in Python.
struct FusedCall {
  using Params = flashmoe_fused_moe_params;
  static constexpr auto kPlan = &flashmoe_fused_moe_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_fused_moe_workspace_size;
  static constexpr auto kRun = &flashmoe_fused_moe;
  static constexpr bool kNeedsWorkspace = true;

  Params params = flashmoe_fused_moe_params_init();
  TensorView tokens;
  TensorView router_weights;
  TensorView router_bias;
  TensorView logits;
  TensorView selection_bias;
  TensorView w_gate_up;
  TensorView w_up;
  TensorView w_down;
  TensorView b_gate_up;
  TensorView b_up;
  TensorView b_down;
  TensorView out;

  void parse(int64_t top_k, const RouteOptions& route, const ForwardOptions& forward) {
    RouteCall of_route;
    ForwardCall of_forward;
    of_route.parse(route);
    of_forward.parse(forward);
    params.top_k = static_cast<int32_t>(top_k);
    params.scoring = of_route.params.scoring;
    params.renormalize = of_route.params.renormalize;
    params.num_groups = of_route.params.num_groups;
    params.top_groups = of_route.params.top_groups;
    params.scale = of_route.params.scale;
    params.gate = of_forward.params.gate;
    params.activation = of_forward.params.activation;
    params.alpha = of_forward.params.alpha;
    params.limit = of_forward.params.limit;
    params.up_offset = of_forward.params.up_offset;
    params.weight_on_input = of_forward.params.weight_on_input;
    params.kernel = of_forward.params.kernel;
  }

  const TensorView& first() const { return tokens; }

  template <class Make>
  void make_outputs(const Make& make) {
    if (out.get() != nullptr || tokens.rank() != 2 || !is_float(tokens.tensor().dtype)) return;
    const int64_t shape[] = {tokens.extent(0), tokens.extent(1)};
    make("out", &out, tokens.tensor().dtype, 2, shape);
  }
};

inline constexpr Field<FusedCall> kFusedFields[] = {
    {"tokens", &FusedCall::tokens, &FusedCall::Params::tokens, Access::kRead},
    {"router_weights", &FusedCall::router_weights, &FusedCall::Params::router_weights,
     Access::kRead},
    {"router_bias", &FusedCall::router_bias, &FusedCall::Params::router_bias, Access::kRead},
    {"logits", &FusedCall::logits, &FusedCall::Params::logits, Access::kRead},
    {"selection_bias", &FusedCall::selection_bias, &FusedCall::Params::selection_bias,
     Access::kRead},
    {"w_gate_up", &FusedCall::w_gate_up, &FusedCall::Params::w_gate_up, Access::kRead},
    {"w_up", &FusedCall::w_up, &FusedCall::Params::w_up, Access::kRead},
    {"w_down", &FusedCall::w_down, &FusedCall::Params::w_down, Access::kRead},
    {"b_gate_up", &FusedCall::b_gate_up, &FusedCall::Params::b_gate_up, Access::kRead},
    {"b_up", &FusedCall::b_up, &FusedCall::Params::b_up, Access::kRead},
    {"b_down", &FusedCall::b_down, &FusedCall::Params::b_down, Access::kRead},
    {"out", &FusedCall::out, &FusedCall::Params::out, Access::kWrite},
};

constexpr const auto& fields_of(const RouteCall&) { return kRouteFields; }
constexpr const auto& fields_of(const ForwardCall&) { return kForwardFields; }
constexpr const auto& fields_of(const ProductCall&) { return kProductFields; }
constexpr const auto& fields_of(const FusedCall&) { return kFusedFields; }

template <class Call>
const typename Call::Params& ready(Call* call) {
  for (const Field<Call>& field : fields_of(*call)) {
    call->params.*field.param = (call->*field.view).get();
  }
  return call->params;
}

// ---- messages -----------------------------------------------------------------------------------

// The library's word for an argument, and the caller's. `everywhere`: it means nothing else.
struct Renamed {
  const char* from;
  const char* to;
  bool everywhere;
};
using Renames = std::vector<Renamed>;

// A sentence of the library with the caller's names: the first word, and what follows a "but " in
// "weights: its number of tokens is 5, but x has 6" or a "shares memory with "; other words where they
// can mean nothing else. A pointer that is absent is None.
std::string renamed(std::string sentence, const Renames& renames);

// Raises the library's sentence so.
void check_renamed(flashmoe_status status, const Renames& renames);

// Of the functions that take the operation's own arguments.
const Renames& names_of(const RouteCall& call);
const Renames& names_of(const ForwardCall& call);
const Renames& names_of(const ProductCall& call);
const Renames& names_of(const FusedCall& call);

// ---- running one operation ----------------------------------------------------------------------

// The GIL is free while the library works: see bindings/attention.cpp.
template <class Call>
flashmoe_status run(const Call& call, void* workspace, size_t bytes, void* stream) {
  nb::gil_scoped_release release;
  const TensorView& first = call.first();
  if (first.get() != nullptr && first.device().device_type != FLASHMOE_DEVICE_CUDA) {
    return run_on_host(Call::kWorkspaceSize, Call::kRun, call.params);
  }
  return Call::kRun(&call.params, workspace, bytes, stream);
}

inline constexpr size_t kMostUsual = size_t{16} << 20;  // bytes of workspace

template <class Call>
void launch(Call* call, const Caller& caller, nb::handle stream) {
  const Renames& renames = names_of(*call);
  ready(call);
  const flashmoe_device device = call->first().device();
  const bool on_gpu = device.device_type == FLASHMOE_DEVICE_CUDA;
  bool named = false;
  void* handle = caller.stream(stream, device, &named);
  // What is usual is not asked for, which costs the host as much as all checks of a call.
  static size_t usual = 0;
  size_t bytes = on_gpu && !named && Call::kNeedsWorkspace ? usual : 0;
  DeviceWorkspace workspace;
  workspace.allocate(caller, bytes, device, handle, named);
  flashmoe_status status = run(*call, workspace.data(), bytes, handle);
  if (status == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL && on_gpu) {
    check_renamed(Call::kWorkspaceSize(&call->params, &bytes), renames);
    if (bytes <= kMostUsual) usual = std::max(usual, bytes);
    DeviceWorkspace larger;
    larger.allocate(caller, bytes, device, handle, named);
    status = run(*call, larger.data(), bytes, handle);
  }
  check_renamed(status, renames);
  caller.finish();
}

// The function of flashmoe_science._moe of that name.
template <class... Arguments>
nb::object dispatch(const char* name, const Arguments&... arguments) {
  return nb::module_::import_("flashmoe_science._moe").attr(name)(arguments...);
}

// ---- arguments ----------------------------------------------------------------------------------

// What logits say of a routing; false if the library must say what is wrong with them.
bool extents_of_logits(const TensorView& logits, int64_t top_k, RouteExtents* extents);
bool extents_of_ids(const TensorView& ids, int64_t experts, RouteExtents* extents);

// That outputs which the caller gave are for as many experts as he asks for: the C ABI takes these
// numbers from the outputs.
void check_given_outputs(const RouteCall& call, const RouteExtents& extents);

struct ForwardTensors {
  nb::handle x;
  nb::handle w_gate_up;
  nb::handle w_up;
  nb::handle w_down;
  nb::handle b_gate_up;
  nb::handle b_up;
  nb::handle b_down;
};

// Views all but the tokens.
template <class Call>
void borrow_weights(Caller& caller, const ForwardTensors& tensors, Call* call) {
  caller.borrow("w_gate_up", tensors.w_gate_up, &call->w_gate_up);
  caller.borrow_optional("w_up", tensors.w_up, &call->w_up);
  caller.borrow("w_down", tensors.w_down, &call->w_down);
  caller.borrow_optional("b_gate_up", tensors.b_gate_up, &call->b_gate_up);
  caller.borrow_optional("b_up", tensors.b_up, &call->b_up);
  caller.borrow_optional("b_down", tensors.b_down, &call->b_down);
}

}  // namespace flashmoe
