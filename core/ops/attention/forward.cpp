// Attention forward: its options, its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstdio>

#include "core/backends.h"
#include "core/operation.h"
#include "core/ops/attention/checks.h"
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
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted is a null pointer: %s",
                name, why);
  };
  constexpr char kNoScales[] = "tensors of 16 bits and more have no scales";
  FLASHMOE_TRY(absent("q_scale", params.q_scale, kNoScales));
  FLASHMOE_TRY(absent("k_scale", params.k_scale, kNoScales));
  return absent("v_scale", params.v_scale, kNoScales);
}

struct AttentionForward {
  using Params = flashmoe_attention_forward_params;
  using Problem = AttentionProblem;
  static constexpr char kName[] = "attention_forward";
  static constexpr char kParams[] = "flashmoe_attention_forward_params";
  static constexpr char kSizeFunction[] = "flashmoe_attention_forward_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, window);
  static constexpr std::array<TensorMember<Params>, 15> kTensors = {{
      {"q", &Params::q},
      {"k", &Params::k},
      {"v", &Params::v},
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
      {"out", &Params::out},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 13;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "attention_forward_";
  static constexpr const AttentionFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kSm89FewRowsAttention, &kSm89DecodeAttention, &kMixedAttention,
#endif
#if FLASHMOE_WITH_SM90
      &kSm90Attention,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89Attention,
#endif
      &kCpuAttention,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    AttentionArguments arguments = AttentionArguments::of(params);
    FLASHMOE_TRY(check_options(kScoreOptions<Params>, params));
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_window(arguments));
    FLASHMOE_TRY(check_unserved(params));
    if (params.sequences != nullptr) {
      FLASHMOE_TRY(check_sequences(*params.sequences));
      arguments.sequences = params.sequences;
    }
    AttentionViews views;
    FLASHMOE_TRY(check_attention(arguments, problem, &views));
    FLASHMOE_TRY(check_no_overlap("out", views.out, 4));
    FLASHMOE_TRY(read_sinks(params.sinks, problem));
    FLASHMOE_TRY(read_bias_and_mask(params.attn_bias, params.attn_mask, problem));
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
    std::snprintf(text, size, "%s%s sinks=%s%s lse=%s", call, options,
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
