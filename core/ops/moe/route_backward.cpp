// Routing, backward: its options, its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstdio>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"
#include "core/ops/moe/options.h"

namespace flashmoe {
namespace {

using Params = flashmoe_moe_route_backward_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("scoring", &Params::scoring, kMoeScorings),
    Option<Params>::flag("renormalize", &Params::renormalize),
    Option<Params>::finite("scale", &Params::scale),
    Option<Params>::flag("accumulate", &Params::accumulate),
};

flashmoe_status check_sources(const Params& params) {
  if ((params.logits != nullptr) == (params.given_weights != nullptr)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "logits: got %s, accepted is either logits or given_weights",
                params.logits != nullptr ? "both logits and given_weights"
                                         : "neither logits nor given_weights");
  }
  if (params.logits != nullptr) {
    return check_absent("dgiven_weights", params.dgiven_weights, "with logits");
  }
  if (params.scoring != 0) {
    return fail(
        FLASHMOE_ERROR_INVALID_ARGUMENT,
        "scoring: got %d, accepted with given_weights is 0, as there are no logits to score",
        params.scoring);
  }
  FLASHMOE_TRY(check_absent("dlse", params.dlse, "with given_weights"));
  return check_absent("dlogits", params.dlogits, "with given_weights");
}

// Reads logits or given weights, and their gradient: rows whose last stride is 1.
flashmoe_status read_scores(const char* name, const flashmoe_tensor* tensor,
                            const char* gradient_name, const flashmoe_tensor* gradient,
                            int64_t columns, MoeRouteBackwardProblem* p) {
  View scores, dscores;
  FLASHMOE_TRY(check_view(name, tensor, 2, &scores));
  FLASHMOE_TRY(check_same_device(name, *tensor, "dweights", p->device));
  FLASHMOE_TRY(check_float_dtype(name, *tensor, p->device, &p->scores.dtype));
  FLASHMOE_TRY(check_last_stride(name, scores, 2));
  FLASHMOE_TRY(check_alignment(name, scores, static_cast<size_t>(dtype_bytes(p->scores.dtype))));
  FLASHMOE_TRY(check_extent(name, "number of tokens", scores.shape[0], "dweights", p->tokens));
  if (p->given) {
    FLASHMOE_TRY(
        check_extent(name, "number of experts of a token", scores.shape[1], "dweights", columns));
  } else {
    FLASHMOE_TRY(check_experts(name, scores.shape[1]));
    p->experts = static_cast<int32_t>(scores.shape[1]);
  }
  p->scores.data = scores.data;
  p->scores.row_stride = scores.strides[0];
  FLASHMOE_TRY(check_view(gradient_name, gradient, 2, &dscores));
  FLASHMOE_TRY(check_same_device(gradient_name, *gradient, "dweights", p->device));
  FLASHMOE_TRY(
      check_same_dtype_or_fp32(gradient_name, *gradient, name, p->scores.dtype, &p->dscores.dtype));
  FLASHMOE_TRY(check_last_stride(gradient_name, dscores, 2));
  FLASHMOE_TRY(
      check_alignment(gradient_name, dscores, static_cast<size_t>(dtype_bytes(p->dscores.dtype))));
  FLASHMOE_TRY(check_extent(gradient_name, "number of tokens", dscores.shape[0], name, p->tokens));
  FLASHMOE_TRY(
      check_extent(gradient_name, "number of columns", dscores.shape[1], name, scores.shape[1]));
  FLASHMOE_TRY(check_no_overlap(gradient_name, dscores, 2));
  p->dscores.data = dscores.data;
  p->dscores.row_stride = dscores.strides[0];
  return FLASHMOE_OK;
}

struct MoeRouteBackward {
  using Params = flashmoe_moe_route_backward_params;
  using Problem = MoeRouteBackwardProblem;
  static constexpr char kName[] = "moe_route_backward";
  static constexpr char kParams[] = "flashmoe_moe_route_backward_params";
  static constexpr char kSizeFunction[] = "flashmoe_moe_route_backward_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);

  static constexpr std::array<TensorMember<Params>, 7> kTensors = {{
      {"dweights", &Params::dweights},
      {"ids", &Params::ids},
      {"logits", &Params::logits},
      {"given_weights", &Params::given_weights},
      {"dlse", &Params::dlse},
      {"dlogits", &Params::dlogits},
      {"dgiven_weights", &Params::dgiven_weights},
  }};
  static constexpr size_t kFirstOutput = 5;
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const MoeRouteBackwardFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaMoeRouteBackward,
#endif
      &kCpuMoeRouteBackward,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    Problem& p = *problem;
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_sources(params));
    View dweights, ids, dlse;
    FLASHMOE_TRY(check_view("dweights", params.dweights, 2, &dweights));
    FLASHMOE_TRY(check_device("dweights", *params.dweights, &p.device));
    p.tokens = dweights.shape[0];
    FLASHMOE_TRY(check_top_k("dweights", dweights.shape[1]));
    p.top_k = static_cast<int32_t>(dweights.shape[1]);
    FLASHMOE_TRY(check_pairs("dweights", p.tokens, p.top_k));
    FLASHMOE_TRY(check_int32_tensor("ids", params.ids, 2, "dweights", p.device, &ids));
    FLASHMOE_TRY(check_extent("ids", "number of tokens", ids.shape[0], "dweights", p.tokens));
    FLASHMOE_TRY(
        check_extent("ids", "number of experts of a token", ids.shape[1], "dweights", p.top_k));
    p.given = params.given_weights != nullptr;
    FLASHMOE_TRY(p.given ? read_scores("given_weights", params.given_weights, "dgiven_weights",
                                       params.dgiven_weights, p.top_k, &p)
                         : read_scores("logits", params.logits, "dlogits", params.dlogits, 0, &p));
    const char* const scores = p.given ? "given_weights" : "logits";
    FLASHMOE_TRY(
        check_numbers("dweights", params.dweights, 2, scores, p.scores.dtype, p.device, &dweights));
    if (params.dlse != nullptr) {
      FLASHMOE_TRY(check_numbers("dlse", params.dlse, 1, scores, p.scores.dtype, p.device, &dlse));
      FLASHMOE_TRY(check_extent("dlse", "number of tokens", dlse.shape[0], "dweights", p.tokens));
      set_numbers(dlse, p.scores.dtype, &p.dlse, &p.wide_dlse);
    }
    set_numbers(dweights, p.scores.dtype, &p.dweights, &p.wide_dweights);
    p.ids = static_cast<const int32_t*>(ids.data);
    p.scoring = static_cast<flashmoe_moe_scoring>(params.scoring);
    p.renormalize = params.renormalize != 0;
    p.scale = params.scale != 0.0f ? params.scale : 1.0f;
    p.accumulate = params.accumulate != 0;
    return FLASHMOE_OK;
  }

  static double flops(const Problem&) { return 0.0; }
  static bool is_empty(const Problem& p) { return p.tokens == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[96];
    print_options(kOptions, params, options, sizeof options);
    std::snprintf(text, size, "tokens=%lld experts=%d top_k=%d %s=%s%s dlse=%s",
                  static_cast<long long>(p.tokens), p.experts, p.top_k,
                  p.given ? "weights" : "logits", dtype_name(p.scores.dtype), options,
                  p.dlse != nullptr || p.wide_dlse != nullptr ? "yes" : "no");
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::MoeRouteBackward;

flashmoe_status flashmoe_moe_route_backward_plan(const flashmoe_moe_route_backward_params* params,
                                                 flashmoe_plan* plan) {
  return flashmoe::plan_operation<MoeRouteBackward>(params, plan);
}

flashmoe_status flashmoe_moe_route_backward_workspace_size(
    const flashmoe_moe_route_backward_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<MoeRouteBackward>(params, bytes);
}

flashmoe_status flashmoe_moe_route_backward(const flashmoe_moe_route_backward_params* params,
                                            void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<MoeRouteBackward>(params, workspace, workspace_size, stream);
}
