// The operations of the mixture of experts, as core/operation.h takes them, each in its own source.
// make_problem() takes other argument names for fused_moe.
#pragma once

#include <array>
#include <cstddef>

#include "core/backends.h"
#include "core/operation.h"

namespace flashmoe {

struct MoeRoute {
  using Params = flashmoe_moe_route_params;
  using Problem = MoeRouteProblem;
  static constexpr char kName[] = "moe_route";
  static constexpr char kParams[] = "flashmoe_moe_route_params";
  static constexpr char kSizeFunction[] = "flashmoe_moe_route_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);

  static constexpr std::array<TensorMember<Params>, 11> kTensors = {{
      {"logits", &Params::logits},
      {"selection_bias", &Params::selection_bias},
      {"given_ids", &Params::given_ids},
      {"given_weights", &Params::given_weights},
      {"expert_map", &Params::expert_map},
      {"ids", &Params::ids},
      {"weights", &Params::weights},
      {"offsets", &Params::offsets},
      {"pairs", &Params::pairs},
      {"slots", &Params::slots},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 5;
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const MoeRouteFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaMoeRoute,
#endif
      &kCpuMoeRoute,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem,
                                      const char* logits = "logits");
  // The same without the outputs. They would tell top_k, which the problem already has.
  static flashmoe_status read_inputs(const Params& params, Problem* problem, const char* logits);
  static double flops(const Problem&) { return 0.0; }
  static bool is_empty(const Problem&) { return false; }  // offsets are written without tokens too
  static void print(const Params& params, const Problem& p, char* text, size_t size);
};

struct MoeForward {
  using Params = flashmoe_moe_forward_params;
  using Problem = MoeForwardProblem;
  static constexpr char kName[] = "moe_forward";
  static constexpr char kParams[] = "flashmoe_moe_forward_params";
  static constexpr char kSizeFunction[] = "flashmoe_moe_forward_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);

  static constexpr std::array<TensorMember<Params>, 13> kTensors = {{
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
      {"out", &Params::out},
      {"pre_activation", &Params::pre_activation},
  }};
  static constexpr size_t kFirstOutput = 11;
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const MoeForwardFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kSm89FewTokensMoeForward,
#endif
#if FLASHMOE_WITH_SM90
      &kSm90MoeForward,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89MoeForward,
#endif
      &kCpuMoeForward,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem, const char* x = "x");
  // The same without the outputs.
  static flashmoe_status read_inputs(const Params& params, Problem* problem, const char* x);
  // Also without the routing.
  static flashmoe_status read_layer(const Params& params, Problem* problem, const char* x);
  // Reads the outputs, after the others. A routing would tell top_k, which the problem already has.
  static flashmoe_status read_outputs(const Params& params, Problem* problem, const char* x);
  static double flops(const Problem& p);
  static bool is_empty(const Problem& p) { return p.tokens == 0; }
  static void print(const Params& params, const Problem& p, char* text, size_t size);
};

struct GroupedProduct {
  using Params = flashmoe_grouped_product_params;
  using Problem = GroupedProductProblem;
  static constexpr char kName[] = "grouped_product";
  static constexpr char kParams[] = "flashmoe_grouped_product_params";
  static constexpr char kSizeFunction[] = "flashmoe_grouped_product_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);

  static constexpr std::array<TensorMember<Params>, 6> kTensors = {{
      {"x", &Params::x},
      {"w", &Params::w},
      {"bias", &Params::bias},
      {"offsets", &Params::offsets},
      {"counts", &Params::counts},
      {"out", &Params::out},
  }};
  static constexpr size_t kFirstOutput = 5;
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const GroupedProductFamily* kFamilies[] = {
#if FLASHMOE_WITH_SM90
      &kSm90GroupedProduct,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89GroupedProduct,
#endif
      &kCpuGroupedProduct,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem);
  static double flops(const Problem& p);
  static bool is_empty(const Problem& p) { return p.rows == 0; }
  static void print(const Params& params, const Problem& p, char* text, size_t size);
};

}  // namespace flashmoe
