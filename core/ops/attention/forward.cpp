// Attention forward: its options, its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstdio>

#include "core/operation.h"
#include "core/ops/attention/checks.h"
#include "core/ops/attention/families.h"
#include "core/ops/attention/sequences.h"
#include "core/option.h"
#include "core/status.h"

namespace flashmoe {

namespace {

using Params = flashmoe_attention_forward_params;

// Behind those of the scores.
constexpr Option<Params> kOptions[] = {
    Option<Params>::reserved("reserved", &Params::reserved),
};

// What the ABI has a place for, and no kernel computes.
flashmoe_status check_unserved(const Params& params) {
  const auto absent = [](const char* name, const void* given, const char* why) {
    if (given == nullptr) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted is none: %s", name, why);
  };
  return absent("q_scale", params.q_scale, "queries of 16 bits and more have no scales");
}

// A dense batch of keys that are not as q is: one of sequences that have all of their tensors.
const flashmoe_attention_sequences* whole_sequences() {
  static const flashmoe_attention_sequences whole = flashmoe_attention_sequences_init();
  return &whole;
}

flashmoe_status read_scale_of(const char* name, const flashmoe_tensor* tensor, const View& k,
                              const AttentionProblem& problem, KeyScales* scales) {
  if (tensor == nullptr) return FLASHMOE_OK;
  if (problem.q.dtype == Dtype::kFloat64) {
    return fail(FLASHMOE_ERROR_UNSUPPORTED,
                "%s: got one and a q of fp64, whose keys and values have no scales", name);
  }
  return read_scale(name, *tensor, "q", problem.device, k.shape[0], problem.heads_kv, scales);
}

bool has_scaled_keys(const Params& params) {
  return params.k_scale != nullptr || params.v_scale != nullptr ||
         (params.k != nullptr && is_fp8(params.k->dtype));
}

struct AttentionForward {
  using Params = flashmoe_attention_forward_params;
  using Problem = AttentionProblem;
  static constexpr char kName[] = "attention_forward";
  static constexpr char kParams[] = "flashmoe_attention_forward_params";
  static constexpr char kSizeFunction[] = "flashmoe_attention_forward_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, window);
  static constexpr std::array<TensorMember<Params>, 18> kTensors = {{
      {"q", &Params::q},
      {"k", &Params::k},
      {"v", &Params::v},
      {"k_scale", &Params::k_scale},
      {"v_scale", &Params::v_scale},
      {"sinks", &Params::sinks},
      {"attn_bias", &Params::attn_bias},
      {"attn_mask", &Params::attn_mask},
      {"cu_seqlens_q", nullptr, table_of<&flashmoe_attention_sequences::cu_seqlens_q>},
      {"cu_seqlens_k", nullptr, table_of<&flashmoe_attention_sequences::cu_seqlens_k>},
      {"seqused_q", nullptr, table_of<&flashmoe_attention_sequences::seqused_q>},
      {"seqused_k", nullptr, table_of<&flashmoe_attention_sequences::seqused_k>},
      {"k_begin", nullptr, table_of<&flashmoe_attention_sequences::k_begin>},
      {"batch_index", nullptr, table_of<&flashmoe_attention_sequences::batch_index>},
      {"page_table", nullptr, table_of<&flashmoe_attention_sequences::page_table>},
      {"q_offset", nullptr, table_of<&flashmoe_attention_sequences::q_offset>},
      {"out", &Params::out},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 16;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "attention_forward_";
  static constexpr const auto& kFamilies = kAttentionFamilies;

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    AttentionArguments arguments = AttentionArguments::of(params);
    FLASHMOE_TRY(check_options(kScoreOptions<Params>, params));
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_window(arguments));
    FLASHMOE_TRY(check_unserved(params));
    arguments.may_be_fp8 = true;
    arguments.most_dim = kMaxHeadDim;
    arguments.most_dim_v = kMaxHeadDimV;
    if (params.sequences != nullptr) {
      FLASHMOE_TRY(check_sequences(*params.sequences));
      arguments.sequences = params.sequences;
    } else if (has_scaled_keys(params)) {
      arguments.sequences = whole_sequences();
    }
    AttentionViews views;
    FLASHMOE_TRY(check_attention(arguments, problem, &views));
    FLASHMOE_TRY(check_no_overlap("out", views.out, 4));
    FLASHMOE_TRY(read_scale_of("k_scale", params.k_scale, views.k, *problem, &problem->k_scale));
    FLASHMOE_TRY(read_scale_of("v_scale", params.v_scale, views.k, *problem, &problem->v_scale));
    FLASHMOE_TRY(read_sinks(params.sinks, problem));
    FLASHMOE_TRY(read_bias_and_mask(params.attn_bias, params.attn_mask, params.sequences != nullptr,
                                    problem));
    if (params.lse == nullptr) return FLASHMOE_OK;
    View lse;
    FLASHMOE_TRY(check_row_numbers("lse", params.lse, arguments, views.q, *problem, &lse,
                                   &problem->lse_strides));
    FLASHMOE_TRY(check_no_overlap("lse", lse, 3));
    problem->lse = lse.data;
    return FLASHMOE_OK;
  }
  static double flops(const Problem& p) { return p.sequences.given ? 0 : attention_flops(p); }
  static bool is_empty(const Problem& p) { return p.batch == 0 || p.seq_q == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char call[256];
    char options[128];
    print_attention(p, call, sizeof call);
    print_options(kScoreOptions<Params>, params, options, sizeof options);
    char keys[48] = "";
    if (flashmoe::has_scaled_keys(p)) {
      std::snprintf(keys, sizeof keys, " keys=%s%s%s", dtype_name(p.k.dtype),
                    p.k_scale.data != nullptr ? ",k_scale" : "",
                    p.v_scale.data != nullptr ? ",v_scale" : "");
    }
    std::snprintf(text, size, "%s%s%s sinks=%s%s lse=%s", call, keys, options,
                  p.sinks.data != nullptr ? "yes" : "no", BiasAndMaskText(p).text,
                  p.lse != nullptr ? "yes" : "no");
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::AttentionForward;

flashmoe_status flashmoe_attention_forward_plan(const flashmoe_attention_forward_params* params,
                                                flashmoe_plan* plan) {
  return flashmoe::plan_operation<AttentionForward>(params, plan);
}

flashmoe_status flashmoe_attention_forward_workspace_size(
    const flashmoe_attention_forward_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<AttentionForward>(params, bytes);
}

flashmoe_status flashmoe_attention_forward(const flashmoe_attention_forward_params* params,
                                           void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<AttentionForward>(params, workspace, workspace_size, stream);
}
