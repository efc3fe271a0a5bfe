// The mixture of experts' operations as calls: see bindings/calls.h.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "bindings/calls.h"
#include "bindings/kept.h"
#include "bindings/torch.h"
#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"

namespace flashmoe {

inline constexpr OperationWords kMoeWords = {"the mixture of experts", "all tensors of a call",
                                             "out", "records gradients of torch's inputs alone",
                                             true};
inline constexpr int64_t kMaxTopK = 32;
inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxPairs = (int64_t{1} << 31) - (int64_t{1} << 16);

int64_t parse_top_k(nb::handle top_k);
uint64_t parse_max_workspace_bytes(nb::handle bytes);  // None: 0, for no bound

// ---- options, for the lists of calls ------------------------------------------------------------

template <class Params>
constexpr Option<Params> top_k_option() {
  return {"top_k",
          [](nb::handle given, Params* p) { p->top_k = static_cast<int32_t>(parse_top_k(given)); }};
}

template <class Params>
constexpr Option<Params> scoring_option() {
  return {"scoring", [](nb::handle given, Params* p) { p->scoring = parse_scoring(given); }};
}

template <class Params>
constexpr Option<Params> renormalize_option() {
  return {"renormalize",
          [](nb::handle given, Params* p) { p->renormalize = parse_flag("renormalize", given); }};
}

template <class Params>
constexpr Option<Params> num_groups_option() {
  return {"num_groups", [](nb::handle given, Params* p) {
            p->num_groups = static_cast<int32_t>(parse_integer(
                "num_groups", given, 1, kMaxExperts, "are 1, for none, and divisors of E"));
          }};
}

template <class Params>
constexpr Option<Params> top_groups_option() {
  return {"top_groups", [](nb::handle given, Params* p) {
            if (given.is_none()) return;
            p->top_groups =
                static_cast<int32_t>(parse_integer("top_groups", given, 1, kMaxExperts,
                                                   "are 1 to num_groups, or None without groups"));
          }};
}

template <class Params>
constexpr Option<Params> scale_option() {
  return {"scale", [](nb::handle given, Params* p) { p->scale = parse_factor("scale", given); }};
}

template <class Params>
constexpr Option<Params> gate_option() {
  return {"gate", [](nb::handle given, Params* p) { p->gate = parse_gate(given); }};
}

template <class Params>
constexpr Option<Params> activation_option() {
  return {"activation",
          [](nb::handle given, Params* p) { p->activation = parse_activation(given); }};
}

template <class Params>
constexpr Option<Params> alpha_option() {
  return {"alpha", [](nb::handle given, Params* p) { p->alpha = parse_factor("alpha", given); }};
}

template <class Params>
constexpr Option<Params> limit_option() {
  return {"limit", [](nb::handle given, Params* p) { p->limit = parse_limit(given); }};
}

template <class Params>
constexpr Option<Params> up_offset_option() {
  return {"up_offset",
          [](nb::handle given, Params* p) { p->up_offset = parse_number("up_offset", given); }};
}

template <class Params>
constexpr Option<Params> weight_on_input_option() {
  return {"weight_on_input", [](nb::handle given, Params* p) {
            p->weight_on_input = parse_flag("weight_on_input", given);
          }};
}

template <class Params>
constexpr Option<Params> max_workspace_bytes_option() {
  return {"max_workspace_bytes", [](nb::handle given, Params* p) {
            p->max_workspace_bytes = parse_max_workspace_bytes(given);
          }};
}

// ---- the operations -----------------------------------------------------------------------------

struct RouteExtents {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;
};

// The extents of a routing from its logits; false if the library must report what is wrong with
// them.
bool extents_of_logits(const TensorView& logits, int64_t top_k, RouteExtents* extents);
bool extents_of_ids(const TensorView& ids, int64_t experts, RouteExtents* extents);

// Routes logits or given ids. With given ids, renormalize and scale are its options.
struct RouteCall {
  using Params = flashmoe_moe_route_params;
  static constexpr char kName[] = "moe_route";
  static constexpr char kTarget[] = "flashmoe_moe_route_v1";
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

  static constexpr Field<RouteCall> kTensors[] = {
      {"logits", &RouteCall::logits, &Params::logits, Access::kRead},
      {"selection_bias", &RouteCall::selection_bias, &Params::selection_bias, Access::kRead},
      {"given_ids", &RouteCall::given_ids, &Params::given_ids, Access::kRead},
      {"given_weights", &RouteCall::given_weights, &Params::given_weights, Access::kRead},
      {"expert_map", &RouteCall::expert_map, &Params::expert_map, Access::kRead},
      {"ids", &RouteCall::ids, &Params::ids, Access::kWrite},
      {"weights", &RouteCall::weights, &Params::weights, Access::kWrite},
      {"offsets", &RouteCall::offsets, &Params::offsets, Access::kWrite},
      {"pairs", &RouteCall::pairs, &Params::pairs, Access::kWrite},
      {"slots", &RouteCall::slots, &Params::slots, Access::kWrite},
      {"lse", &RouteCall::lse, &Params::lse, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      scoring_option<Params>(),    renormalize_option<Params>(), num_groups_option<Params>(),
      top_groups_option<Params>(), scale_option<Params>(),
  };

  const TensorView& first() const { return logits.get() != nullptr ? logits : given_ids; }

  // Checks that the caller's outputs are for the requested number of experts, since the C ABI takes
  // these numbers from the outputs.
  void check_given_outputs(const RouteExtents& extents) const;

  template <class Make>
  void make_outputs(const RouteExtents& extents, bool want_lse, const Make& make) {
    const TensorView& scores = logits.get() != nullptr ? logits : given_weights;
    const bool wide = scores.get() != nullptr && is_fp64(scores.tensor().dtype);
    const flashmoe_dtype numbers = wide ? kFloat64 : kFloat32;
    const int64_t each[] = {extents.tokens, extents.top_k};
    const int64_t sorted[] = {extents.tokens * extents.top_k};
    const int64_t bounds[] = {extents.experts + 1};
    if (ids.get() == nullptr) make("ids", &ids, kInt32, 2, each);
    if (weights.get() == nullptr) make("weights", &weights, numbers, 2, each);
    if (offsets.get() == nullptr) make("offsets", &offsets, kInt32, 1, bounds);
    if (pairs.get() == nullptr) make("pairs", &pairs, kInt32, 1, sorted);
    if (slots.get() == nullptr) make("slots", &slots, kInt32, 2, each);
    if (want_lse && lse.get() == nullptr) make("lse", &lse, numbers, 1, &extents.tokens);
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    RouteExtents extents;
    const nb::object experts = option_of(options, "num_experts");
    const bool known =
        experts.is_none()
            ? extents_of_logits(logits, parse_top_k(option_of(options, "top_k")), &extents)
            : extents_of_ids(given_ids, nb::cast<int64_t>(experts), &extents);
    if (!known) return;
    check_given_outputs(extents);
    make_outputs(extents, wants(options, "return_lse"), make);
  }
};

struct ForwardCall {
  using Params = flashmoe_moe_forward_params;
  static constexpr char kName[] = "moe_forward";
  static constexpr char kTarget[] = "flashmoe_moe_forward_v1";
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

  static constexpr Field<ForwardCall> kTensors[] = {
      {"x", &ForwardCall::x, &Params::x, Access::kRead},
      {"w_gate_up", &ForwardCall::w_gate_up, &Params::w_gate_up, Access::kRead},
      {"w_up", &ForwardCall::w_up, &Params::w_up, Access::kRead},
      {"w_down", &ForwardCall::w_down, &Params::w_down, Access::kRead},
      {"b_gate_up", &ForwardCall::b_gate_up, &Params::b_gate_up, Access::kRead},
      {"b_up", &ForwardCall::b_up, &Params::b_up, Access::kRead},
      {"b_down", &ForwardCall::b_down, &Params::b_down, Access::kRead},
      {"weights", &ForwardCall::weights, &Params::weights, Access::kRead},
      {"offsets", &ForwardCall::offsets, &Params::offsets, Access::kRead},
      {"pairs", &ForwardCall::pairs, &Params::pairs, Access::kRead},
      {"slots", &ForwardCall::slots, &Params::slots, Access::kRead},
      {"out", &ForwardCall::out, &Params::out, Access::kWrite},
      {"pre_activation", &ForwardCall::pre_activation, &Params::pre_activation, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      gate_option<Params>(),   activation_option<Params>(), alpha_option<Params>(),
      limit_option<Params>(),  up_offset_option<Params>(),  weight_on_input_option<Params>(),
      kernel_option<Params>(),
  };

  const TensorView& first() const { return x; }

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

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(wants(options, "return_pre_activation"), make);
  }
};

struct ProductCall {
  using Params = flashmoe_grouped_product_params;
  static constexpr char kName[] = "grouped_product";
  static constexpr char kTarget[] = "flashmoe_grouped_product_v1";
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

  static constexpr Field<ProductCall> kTensors[] = {
      {"x", &ProductCall::x, &Params::x, Access::kRead},
      {"w", &ProductCall::w, &Params::w, Access::kRead},
      {"bias", &ProductCall::bias, &Params::bias, Access::kRead},
      {"offsets", &ProductCall::offsets, &Params::offsets, Access::kRead},
      {"counts", &ProductCall::counts, &Params::counts, Access::kRead},
      {"out", &ProductCall::out, &Params::out, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      kernel_option<Params>(),
  };

  const TensorView& first() const { return x; }

  template <class Make>
  void make_outputs(const nb::dict&, const Make& make) {
    const int rank = x.rank();
    if (out.get() != nullptr || (rank != 2 && rank != 3) || w.rank() != 3 ||
        !is_float(x.tensor().dtype)) {
      return;
    }
    const int64_t shape[] = {x.extent(0), rank == 3 ? x.extent(1) : w.extent(1), w.extent(1)};
    make("out", &out, x.tensor().dtype, rank, shape);
  }
};

struct FusedCall {
  using Params = flashmoe_fused_moe_params;
  static constexpr char kName[] = "fused_moe";
  static constexpr char kTarget[] = "flashmoe_fused_moe_v1";
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

  static constexpr Field<FusedCall> kTensors[] = {
      {"tokens", &FusedCall::tokens, &Params::tokens, Access::kRead},
      {"router_weights", &FusedCall::router_weights, &Params::router_weights, Access::kRead},
      {"router_bias", &FusedCall::router_bias, &Params::router_bias, Access::kRead},
      {"logits", &FusedCall::logits, &Params::logits, Access::kRead},
      {"selection_bias", &FusedCall::selection_bias, &Params::selection_bias, Access::kRead},
      {"w_gate_up", &FusedCall::w_gate_up, &Params::w_gate_up, Access::kRead},
      {"w_up", &FusedCall::w_up, &Params::w_up, Access::kRead},
      {"w_down", &FusedCall::w_down, &Params::w_down, Access::kRead},
      {"b_gate_up", &FusedCall::b_gate_up, &Params::b_gate_up, Access::kRead},
      {"b_up", &FusedCall::b_up, &Params::b_up, Access::kRead},
      {"b_down", &FusedCall::b_down, &Params::b_down, Access::kRead},
      {"out", &FusedCall::out, &Params::out, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      top_k_option<Params>(),      scoring_option<Params>(),    renormalize_option<Params>(),
      num_groups_option<Params>(), top_groups_option<Params>(), scale_option<Params>(),
      gate_option<Params>(),       activation_option<Params>(), alpha_option<Params>(),
      limit_option<Params>(),      up_offset_option<Params>(),  weight_on_input_option<Params>(),
      kernel_option<Params>(),
  };

  const TensorView& first() const { return tokens; }

  template <class Make>
  void make_outputs(const nb::dict&, const Make& make) {
    if (out.get() != nullptr || tokens.rank() != 2 || !is_float(tokens.tensor().dtype)) return;
    const int64_t shape[] = {tokens.extent(0), tokens.extent(1)};
    make("out", &out, tokens.tensor().dtype, 2, shape);
  }
};

// ---- gradients ----------------------------------------------------------------------------------

template <class Params>
constexpr Option<Params> accumulate_option() {
  return {"accumulate",
          [](nb::handle given, Params* p) { p->accumulate = parse_flag("accumulate", given); }};
}

template <class Params>
constexpr Option<Params> overwrite_pre_activation_option() {
  return {"overwrite_pre_activation", [](nb::handle given, Params* p) {
            p->overwrite_pre_activation = parse_flag("overwrite_pre_activation", given);
          }};
}

// A gradient and its tensor.
template <class Call>
struct Gradient {
  const char* name;
  TensorView Call::* view;
  TensorView Call::* of;
};

// Makes missing gradients that are wanted, with the shape and dtype of their tensors, except with
// accumulate. `wanted`: a flag for each, in order; None is all.
template <class Call, size_t kCount, class Make>
void make_gradients(const Gradient<Call> (&gradients)[kCount], nb::handle wanted, Call* call,
                    const Make& make) {
  if (call->params.accumulate != 0) return;
  for (size_t i = 0; i < kCount; ++i) {
    const TensorView& of = call->*gradients[i].of;
    TensorView* const view = &(call->*gradients[i].view);
    const bool make_it = wanted.is_none() || nb::cast<bool>(wanted[i]);
    if (!make_it || view->get() != nullptr || of.get() == nullptr || !is_float(of.tensor().dtype) ||
        of.rank() > TensorView::kMaxRank) {
      continue;
    }
    int64_t shape[TensorView::kMaxRank];
    for (int axis = 0; axis < of.rank(); ++axis) shape[axis] = of.extent(axis);
    make(gradients[i].name, view, of.tensor().dtype, of.rank(), shape);
  }
}

struct BackwardCall {
  using Params = flashmoe_moe_backward_params;
  static constexpr char kName[] = "moe_backward";
  static constexpr char kTarget[] = "flashmoe_moe_backward_v1";
  static constexpr auto kPlan = &flashmoe_moe_backward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_backward_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_backward;
  static constexpr bool kNeedsWorkspace = true;

  Params params = flashmoe_moe_backward_params_init();
  TensorView dout, x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down;
  TensorView weights, offsets, pairs, slots, pre_activation;
  TensorView dx, dw_gate_up, dw_up, dw_down, db_gate_up, db_up, db_down, dweights;

  static constexpr Field<BackwardCall> kTensors[] = {
      {"dout", &BackwardCall::dout, &Params::dout, Access::kRead},
      {"x", &BackwardCall::x, &Params::x, Access::kRead},
      {"w_gate_up", &BackwardCall::w_gate_up, &Params::w_gate_up, Access::kRead},
      {"w_up", &BackwardCall::w_up, &Params::w_up, Access::kRead},
      {"w_down", &BackwardCall::w_down, &Params::w_down, Access::kRead},
      {"b_gate_up", &BackwardCall::b_gate_up, &Params::b_gate_up, Access::kRead},
      {"b_up", &BackwardCall::b_up, &Params::b_up, Access::kRead},
      {"b_down", &BackwardCall::b_down, &Params::b_down, Access::kRead},
      {"weights", &BackwardCall::weights, &Params::weights, Access::kRead},
      {"offsets", &BackwardCall::offsets, &Params::offsets, Access::kRead},
      {"pairs", &BackwardCall::pairs, &Params::pairs, Access::kRead},
      {"slots", &BackwardCall::slots, &Params::slots, Access::kRead},
      {"pre_activation", &BackwardCall::pre_activation, &Params::pre_activation, Access::kRead},
      {"dx", &BackwardCall::dx, &Params::dx, Access::kWrite},
      {"dw_gate_up", &BackwardCall::dw_gate_up, &Params::dw_gate_up, Access::kWrite},
      {"dw_up", &BackwardCall::dw_up, &Params::dw_up, Access::kWrite},
      {"dw_down", &BackwardCall::dw_down, &Params::dw_down, Access::kWrite},
      {"db_gate_up", &BackwardCall::db_gate_up, &Params::db_gate_up, Access::kWrite},
      {"db_up", &BackwardCall::db_up, &Params::db_up, Access::kWrite},
      {"db_down", &BackwardCall::db_down, &Params::db_down, Access::kWrite},
      {"dweights", &BackwardCall::dweights, &Params::dweights, Access::kWrite},
  };
  static constexpr Gradient<BackwardCall> kGradients[] = {
      {"dx", &BackwardCall::dx, &BackwardCall::x},
      {"dw_gate_up", &BackwardCall::dw_gate_up, &BackwardCall::w_gate_up},
      {"dw_up", &BackwardCall::dw_up, &BackwardCall::w_up},
      {"dw_down", &BackwardCall::dw_down, &BackwardCall::w_down},
      {"db_gate_up", &BackwardCall::db_gate_up, &BackwardCall::b_gate_up},
      {"db_up", &BackwardCall::db_up, &BackwardCall::b_up},
      {"db_down", &BackwardCall::db_down, &BackwardCall::b_down},
      {"dweights", &BackwardCall::dweights, &BackwardCall::weights},
  };

  static constexpr Option<Params> kOptions[] = {
      gate_option<Params>(),
      activation_option<Params>(),
      alpha_option<Params>(),
      limit_option<Params>(),
      up_offset_option<Params>(),
      weight_on_input_option<Params>(),
      accumulate_option<Params>(),
      kernel_option<Params>(),
      max_workspace_bytes_option<Params>(),
      overwrite_pre_activation_option<Params>(),
  };

  const TensorView& first() const { return dout; }

  template <class Make>
  void make_outputs(nb::handle wanted, const Make& make) {
    make_gradients(kGradients, wanted, this, make);
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(option_of(options, "wanted"), make);
  }
};

struct ProductBackwardCall {
  using Params = flashmoe_grouped_product_backward_params;
  static constexpr char kName[] = "grouped_product_backward";
  static constexpr char kTarget[] = "flashmoe_grouped_product_backward_v1";
  static constexpr auto kPlan = &flashmoe_grouped_product_backward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_grouped_product_backward_workspace_size;
  static constexpr auto kRun = &flashmoe_grouped_product_backward;
  static constexpr bool kNeedsWorkspace = true;

  Params params = flashmoe_grouped_product_backward_params_init();
  TensorView dout, x, w, offsets, counts, dx, dw, dbias;

  static constexpr Field<ProductBackwardCall> kTensors[] = {
      {"dout", &ProductBackwardCall::dout, &Params::dout, Access::kRead},
      {"x", &ProductBackwardCall::x, &Params::x, Access::kRead},
      {"w", &ProductBackwardCall::w, &Params::w, Access::kRead},
      {"offsets", &ProductBackwardCall::offsets, &Params::offsets, Access::kRead},
      {"counts", &ProductBackwardCall::counts, &Params::counts, Access::kRead},
      {"dx", &ProductBackwardCall::dx, &Params::dx, Access::kWrite},
      {"dw", &ProductBackwardCall::dw, &Params::dw, Access::kWrite},
      {"dbias", &ProductBackwardCall::dbias, &Params::dbias, Access::kWrite},
  };
  static constexpr Gradient<ProductBackwardCall> kGradients[] = {
      {"dx", &ProductBackwardCall::dx, &ProductBackwardCall::x},
      {"dw", &ProductBackwardCall::dw, &ProductBackwardCall::w},
  };

  static constexpr Option<Params> kOptions[] = {
      accumulate_option<Params>(),
      kernel_option<Params>(),
  };

  const TensorView& first() const { return dout; }

  static bool has_columns(const TensorView& view) {
    return view.rank() >= 1 && view.rank() <= TensorView::kMaxRank;
  }

  // Makes wanted gradients without a tensor to copy, in dout's dtype: dx without x, dw without w,
  // and dbias.
  template <class Make>
  void make_outputs(nb::handle wanted, const Make& make) {
    make_gradients(kGradients, wanted, this, make);
    if (params.accumulate != 0 || wanted.is_none() || !has_columns(dout) ||
        !is_float(dout.tensor().dtype)) {
      return;
    }
    const auto is_wanted = [&wanted](int which, const TensorView& view) {
      return view.get() == nullptr && nb::cast<bool>(wanted[which]);
    };
    const auto make_like_dout = [&](const char* name, TensorView* view, int rank,
                                    const int64_t* shape) {
      make(name, view, dout.tensor().dtype, rank, shape);
    };
    const int rank = dout.rank();
    if (is_wanted(0, dx) && x.get() == nullptr && w.rank() == 3) {
      int64_t shape[TensorView::kMaxRank];
      for (int axis = 0; axis < rank - 1; ++axis) shape[axis] = dout.extent(axis);
      shape[rank - 1] = w.extent(2);
      make_like_dout("dx", &dx, rank, shape);
    }
    const TensorView& held = offsets.get() != nullptr ? offsets : counts;
    if (held.rank() != 1) return;
    const int64_t experts = held.extent(0) - (offsets.get() != nullptr ? 1 : 0);
    if (experts < 1) return;
    if (is_wanted(1, dw) && w.get() == nullptr && has_columns(x)) {
      const int64_t shape[] = {experts, dout.extent(rank - 1), x.extent(x.rank() - 1)};
      make_like_dout("dw", &dw, 3, shape);
    }
    if (is_wanted(2, dbias)) {
      const int64_t shape[] = {experts, dout.extent(rank - 1)};
      make_like_dout("dbias", &dbias, 2, shape);
    }
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(option_of(options, "wanted"), make);
  }
};

struct RouteBackwardCall {
  using Params = flashmoe_moe_route_backward_params;
  static constexpr char kName[] = "moe_route_backward";
  static constexpr char kTarget[] = "flashmoe_moe_route_backward_v1";
  static constexpr auto kPlan = &flashmoe_moe_route_backward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_route_backward_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_route_backward;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_moe_route_backward_params_init();
  TensorView dweights, ids, logits, given_weights, dlse, dlogits, dgiven_weights;

  static constexpr Field<RouteBackwardCall> kTensors[] = {
      {"dweights", &RouteBackwardCall::dweights, &Params::dweights, Access::kRead},
      {"ids", &RouteBackwardCall::ids, &Params::ids, Access::kRead},
      {"logits", &RouteBackwardCall::logits, &Params::logits, Access::kRead},
      {"given_weights", &RouteBackwardCall::given_weights, &Params::given_weights, Access::kRead},
      {"dlse", &RouteBackwardCall::dlse, &Params::dlse, Access::kRead},
      {"dlogits", &RouteBackwardCall::dlogits, &Params::dlogits, Access::kWrite},
      {"dgiven_weights", &RouteBackwardCall::dgiven_weights, &Params::dgiven_weights,
       Access::kWrite},
  };
  static constexpr Gradient<RouteBackwardCall> kGradients[] = {
      {"dlogits", &RouteBackwardCall::dlogits, &RouteBackwardCall::logits},
      {"dgiven_weights", &RouteBackwardCall::dgiven_weights, &RouteBackwardCall::given_weights},
  };

  static constexpr Option<Params> kOptions[] = {
      scoring_option<Params>(),
      renormalize_option<Params>(),
      scale_option<Params>(),
      accumulate_option<Params>(),
  };

  const TensorView& first() const { return dweights; }

  template <class Make>
  void make_outputs(nb::handle wanted, const Make& make) {
    make_gradients(kGradients, wanted, this, make);
  }

  template <class Make>
  void make_outputs(const nb::dict&, const Make& make) {
    make_outputs(nb::none(), make);
  }
};

// ---- arguments ----------------------------------------------------------------------------------

// A MoeRouting's parts.
struct Routing {
  nb::object ids;
  nb::object weights;
  nb::object offsets;
  nb::object pairs;
  nb::object slots;
  nb::object lse;

  static constexpr int kParts = 6;
  static Routing parse(const char* name, nb::handle routing);
};

// Like type(*values) of a NamedTuple, whose own constructor is Python code.
nb::object named_tuple(Kept& type, const nb::tuple& values);

// Calls the function of that name in flashmoe_science._moe.
template <class... Arguments>
nb::object dispatch(const char* name, const Arguments&... arguments) {
  return nb::module_::import_("flashmoe_science._moe").attr(name)(arguments...);
}

// The same in flashmoe_science._moe_autograd, which records the gradients of torch's tensors.
template <class... Arguments>
nb::object record(const char* name, const Arguments&... arguments) {
  return nb::module_::import_("flashmoe_science._moe_autograd").attr(name)(arguments...);
}

// Whether torch.autocast casts tensors of a call, one of which is fp32. The functions above cast
// them.
inline bool is_cast(const TensorType& type, std::initializer_list<const TensorView*> views) {
  if (!type.is_torch) return false;
  for (const TensorView* view : views) {
    const flashmoe_dtype dtype = view->tensor().dtype;
    if (dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 32) return torch_casts(view->device());
  }
  return false;
}

struct LayerWeights {
  nb::handle w_gate_up;
  nb::handle w_up;
  nb::handle w_down;
  nb::handle b_gate_up;
  nb::handle b_up;
  nb::handle b_down;
};

template <class Call>
void borrow_weights(Caller& caller, const LayerWeights& tensors, Call* call) {
  caller.borrow("w_gate_up", tensors.w_gate_up, &call->w_gate_up);
  caller.borrow_optional("w_up", tensors.w_up, &call->w_up);
  caller.borrow("w_down", tensors.w_down, &call->w_down);
  caller.borrow_optional("b_gate_up", tensors.b_gate_up, &call->b_gate_up);
  caller.borrow_optional("b_up", tensors.b_up, &call->b_up);
  caller.borrow_optional("b_down", tensors.b_down, &call->b_down);
}

}  // namespace flashmoe
