// Routing: its options, its checks and its families. See core/operation.h for the rest.
#include <cmath>
#include <cstdio>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"
#include "core/ops/moe/options.h"

namespace flashmoe {
namespace {

using Params = flashmoe_moe_route_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("scoring", &Params::scoring, kMoeScorings),
    Option<Params>::flag("renormalize", &Params::renormalize),
    Option<Params>::finite("scale", &Params::scale),
    Option<Params>::reserved("reserved", &Params::reserved),
};

// Given ids leave no logits to score.
flashmoe_status check_scoring(const flashmoe_moe_route_params& params) {
  FLASHMOE_TRY(check_options(kOptions, params));
  if (params.given_ids == nullptr || params.scoring == 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "scoring: got %d, accepted with given_ids is 0, as there are no logits to score",
              params.scoring);
}

// Checks logits or the given choice, and what goes with either.
flashmoe_status check_sources(const flashmoe_moe_route_params& params) {
  if ((params.logits != nullptr) == (params.given_ids != nullptr)) {
    return fail(
        FLASHMOE_ERROR_INVALID_ARGUMENT, "logits: got %s, accepted is either logits or given_ids",
        params.logits != nullptr ? "both logits and given_ids" : "neither logits nor given_ids");
  }
  if (params.logits != nullptr) {
    FLASHMOE_TRY(check_absent("given_weights", params.given_weights, "with logits"));
    FLASHMOE_TRY(check_absent("expert_map", params.expert_map, "with logits"));
    if (params.scoring != FLASHMOE_MOE_SIGMOID) {
      FLASHMOE_TRY(
          check_absent("selection_bias", params.selection_bias, "unless scoring is 2 (sigmoid)"));
    }
    return FLASHMOE_OK;
  }
  FLASHMOE_TRY(check_absent("selection_bias", params.selection_bias, "with given_ids"));
  return check_absent("lse", params.lse, "with given_ids");
}

flashmoe_status read_logits(const flashmoe_moe_route_params& params, const char* name,
                            MoeRouteProblem* p) {
  View logits;
  FLASHMOE_TRY(check_view(name, params.logits, 2, &logits));
  FLASHMOE_TRY(check_device(name, *params.logits, &p->device));
  FLASHMOE_TRY(check_float_dtype(name, *params.logits, p->device, &p->logits_dtype));
  FLASHMOE_TRY(check_last_stride(name, logits, 2));
  FLASHMOE_TRY(check_alignment(name, logits, static_cast<size_t>(dtype_bytes(p->logits_dtype))));
  FLASHMOE_TRY(check_experts(name, logits.shape[1]));
  p->tokens = logits.shape[0];
  p->experts = static_cast<int32_t>(logits.shape[1]);
  p->logits = logits.data;
  p->logits_stride = logits.strides[0];
  if (params.selection_bias != nullptr) {
    View bias;
    Dtype dtype;
    FLASHMOE_TRY(check_numbers_or_fp32("selection_bias", params.selection_bias, 1, name,
                                       p->logits_dtype, p->device, &bias, &dtype));
    FLASHMOE_TRY(
        check_extent("selection_bias", "number of experts", bias.shape[0], name, p->experts));
    set_numbers(bias, dtype, &p->selection_bias, &p->wide_selection_bias);
  }
  return FLASHMOE_OK;
}

flashmoe_status read_given(const flashmoe_moe_route_params& params, MoeRouteProblem* p) {
  View ids;
  FLASHMOE_TRY(check_view("given_ids", params.given_ids, 2, &ids));
  FLASHMOE_TRY(check_device("given_ids", *params.given_ids, &p->device));
  FLASHMOE_TRY(check_index_dtype("given_ids", *params.given_ids, &p->given_ids_are_64));
  FLASHMOE_TRY(check_last_stride("given_ids", ids, 2));
  FLASHMOE_TRY(
      check_alignment("given_ids", ids, p->given_ids_are_64 ? sizeof(int64_t) : sizeof(int32_t)));
  p->tokens = ids.shape[0];
  p->given_ids = ids.data;
  p->given_ids_stride = ids.strides[0];
  if (params.given_weights != nullptr) {
    View weights;
    FLASHMOE_TRY(check_view("given_weights", params.given_weights, 2, &weights));
    FLASHMOE_TRY(check_same_device("given_weights", *params.given_weights, "given_ids", p->device));
    FLASHMOE_TRY(check_float_dtype("given_weights", *params.given_weights, p->device,
                                   &p->given_weights_dtype));
    FLASHMOE_TRY(check_last_stride("given_weights", weights, 2));
    FLASHMOE_TRY(check_alignment("given_weights", weights,
                                 static_cast<size_t>(dtype_bytes(p->given_weights_dtype))));
    FLASHMOE_TRY(check_extent("given_weights", "number of tokens", weights.shape[0], "given_ids",
                              ids.shape[0]));
    FLASHMOE_TRY(check_extent("given_weights", "number of experts of a token", weights.shape[1],
                              "given_ids", ids.shape[1]));
    p->given_weights = weights.data;
    p->given_weights_stride = weights.strides[0];
  }
  if (params.expert_map != nullptr) {
    View map;
    FLASHMOE_TRY(
        check_int32_tensor("expert_map", params.expert_map, 1, "given_ids", p->device, &map));
    static constexpr int32_t kNothing = 0;  // an empty map may have no data, but is still a map
    p->expert_map = map.shape[0] > 0 ? static_cast<const int32_t*>(map.data) : &kNothing;
    p->expert_map_size = map.shape[0];
  }
  return FLASHMOE_OK;
}

flashmoe_status read_sources(const flashmoe_moe_route_params& params, const char* logits,
                             MoeRouteProblem* p) {
  FLASHMOE_TRY(check_scoring(params));
  FLASHMOE_TRY(check_sources(params));
  return params.logits != nullptr ? read_logits(params, logits, p) : read_given(params, p);
}

flashmoe_status read_outputs(const flashmoe_moe_route_params& params, const char* logits,
                             MoeRouteProblem* p) {
  const bool from_logits = params.logits != nullptr;  // without tokens the data may be null
  const char* const of = from_logits ? logits : "given_ids";
  const char* const scores = params.given_weights != nullptr ? "given_weights" : of;
  const Dtype dtype = from_logits ? p->logits_dtype : p->given_weights_dtype;
  const auto has_pairs = [p, of](const char* name, const View& view) {
    FLASHMOE_TRY(check_extent(name, "number of tokens", view.shape[0], of, p->tokens));
    return check_extent(name, "number of experts of a token", view.shape[1], "ids", p->top_k);
  };
  View ids, weights, offsets, pairs, slots;
  FLASHMOE_TRY(check_int32_tensor("ids", params.ids, 2, of, p->device, &ids));
  FLASHMOE_TRY(check_top_k("ids", ids.shape[1]));
  p->top_k = static_cast<int32_t>(ids.shape[1]);
  FLASHMOE_TRY(has_pairs("ids", ids));
  FLASHMOE_TRY(check_pairs("ids", p->tokens, p->top_k));
  FLASHMOE_TRY(check_numbers("weights", params.weights, 2, scores, dtype, p->device, &weights));
  FLASHMOE_TRY(has_pairs("weights", weights));
  FLASHMOE_TRY(check_int32_tensor("slots", params.slots, 2, of, p->device, &slots));
  FLASHMOE_TRY(has_pairs("slots", slots));
  FLASHMOE_TRY(check_int32_tensor("pairs", params.pairs, 1, of, p->device, &pairs));
  FLASHMOE_TRY(
      check_extent("pairs", "number of pairs", pairs.shape[0], "ids", p->tokens * p->top_k));
  FLASHMOE_TRY(check_int32_tensor("offsets", params.offsets, 1, of, p->device, &offsets));
  p->ids = static_cast<int32_t*>(ids.data);
  set_numbers(weights, dtype, &p->weights, &p->wide_weights);
  p->offsets = static_cast<int32_t*>(offsets.data);
  p->pairs = static_cast<int32_t*>(pairs.data);
  p->slots = static_cast<int32_t*>(slots.data);
  if (params.lse != nullptr) {
    View lse;
    FLASHMOE_TRY(check_numbers("lse", params.lse, 1, of, dtype, p->device, &lse));
    FLASHMOE_TRY(check_extent("lse", "number of tokens", lse.shape[0], of, p->tokens));
    set_numbers(lse, dtype, &p->lse, &p->wide_lse);
  }
  if (!from_logits) {
    FLASHMOE_TRY(check_experts("offsets", offsets.shape[0] - 1));
    p->experts = static_cast<int32_t>(offsets.shape[0] - 1);
    return FLASHMOE_OK;
  }
  if (p->top_k > p->experts) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "ids: got %d experts of a token, accepted are at most the %d of logits", p->top_k,
                p->experts);
  }
  return check_extent("offsets", "number of experts and one more", offsets.shape[0], of,
                      int64_t{p->experts} + 1);
}

flashmoe_status read_groups(const flashmoe_moe_route_params& params, MoeRouteProblem* p) {
  const int32_t groups = params.num_groups;
  const int32_t top = params.top_groups;
  p->num_groups = p->top_groups = 1;
  if (groups < 0 || (groups > 1 && params.scoring != FLASHMOE_MOE_SIGMOID)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "num_groups: got %d with scoring %d, accepted is 0 or 1 (none), and more with "
                "scoring 2 (sigmoid)",
                groups, params.scoring);
  }
  if (groups <= 1) {
    if (top == 0 || (top == 1 && groups == 1)) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "top_groups: got %d, accepted with num_groups %d is %s", top, groups,
                groups == 1 ? "0 or 1" : "0");
  }
  if (p->experts % groups != 0 || p->experts / groups < 2) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "num_groups: got %d, accepted are divisors of the %d experts that leave a group 2 "
                "or more",
                groups, p->experts);
  }
  if (top < 1 || top > groups) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "top_groups: got %d, accepted with num_groups %d are 1 to %d", top, groups, groups);
  }
  if (int64_t{top} * (p->experts / groups) < p->top_k) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "top_groups: got %d groups of %d experts, too few to choose the %d of a token from",
                top, p->experts / groups, p->top_k);
  }
  p->num_groups = groups;
  p->top_groups = top;
  return FLASHMOE_OK;
}

// Reads how experts are chosen and weighed, after top_k.
flashmoe_status read_choice(const flashmoe_moe_route_params& params, MoeRouteProblem* p) {
  FLASHMOE_TRY(read_groups(params, p));
  p->scoring = static_cast<flashmoe_moe_scoring>(params.scoring);
  p->renormalize = params.renormalize != 0;
  p->scale = params.scale != 0.0f ? params.scale : 1.0f;
  return FLASHMOE_OK;
}

}  // namespace

flashmoe_status MoeRoute::make_problem(const Params& params, Problem* problem, const char* logits) {
  FLASHMOE_TRY(read_sources(params, logits, problem));
  FLASHMOE_TRY(read_outputs(params, logits, problem));
  return read_choice(params, problem);
}

flashmoe_status MoeRoute::read_inputs(const Params& params, Problem* problem, const char* logits) {
  FLASHMOE_TRY(read_sources(params, logits, problem));
  return read_choice(params, problem);
}

void MoeRoute::print(const Params& params, const Problem& p, char* text, size_t size) {
  const char* source = p.logits != nullptr  ? dtype_name(p.logits_dtype)
                       : p.given_ids_are_64 ? "int64"
                                            : "int32";
  const bool biased = p.selection_bias != nullptr || p.wide_selection_bias != nullptr;
  const bool with_lse = p.lse != nullptr || p.wide_lse != nullptr;
  char options[96];
  print_options(kOptions, params, options, sizeof options);
  std::snprintf(
      text, size, "tokens=%lld experts=%d top_k=%d %s=%s%s groups=%d/%d bias=%s map=%s lse=%s",
      static_cast<long long>(p.tokens), p.experts, p.top_k, p.logits != nullptr ? "logits" : "ids",
      source, options, p.top_groups, p.num_groups, biased ? "yes" : "no",
      p.expert_map != nullptr ? "yes" : "no", with_lse ? "yes" : "no");
}

}  // namespace flashmoe

using flashmoe::MoeRoute;

flashmoe_status flashmoe_moe_route_plan(const flashmoe_moe_route_params* params,
                                        flashmoe_plan* plan) {
  return flashmoe::plan_operation<MoeRoute>(params, plan);
}

flashmoe_status flashmoe_moe_route_workspace_size(const flashmoe_moe_route_params* params,
                                                  size_t* bytes) {
  return flashmoe::workspace_size_of<MoeRoute>(params, bytes);
}

flashmoe_status flashmoe_moe_route(const flashmoe_moe_route_params* params, void* workspace,
                                   size_t workspace_size, void* stream) {
  return flashmoe::run_operation<MoeRoute>(params, workspace, workspace_size, stream);
}
