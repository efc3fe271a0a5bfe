// Attention forward: its options, its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/operation.h"
#include "core/ops/attention/checks.h"
#include "core/ops/attention/families.h"
#include "core/ops/attention/merge_in.h"
#include "core/ops/attention/sequences.h"
#include "core/option.h"
#include "core/status.h"

namespace flashmoe {

namespace {

using Params = flashmoe_attention_forward_params;

// They follow those of the scores.
constexpr Option<Params> kOptions[] = {
    Option<Params>::reserved("reserved", &Params::reserved),
};

// Refuses what the ABI has fields for but no kernel computes.
flashmoe_status check_unserved(const Params& params) {
  const auto absent = [](const char* name, const void* given, const char* why) {
    if (given == nullptr) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted is none: %s", name, why);
  };
  return absent("q_scale", params.q_scale, "queries of 16 bits and more have no scales");
}

// Sequences that span all of their tensors: a dense batch whose keys differ from q in dtype, or
// have scales.
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
  static constexpr std::array<TensorMember<Params>, 20> kTensors = {{
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
      {"prior_out", &Params::prior_out},
      {"prior_lse", &Params::prior_lse},
      {"out", &Params::out},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 18;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "attention_forward_";
  static constexpr const auto& kFamilies = kAttentionFamilies;

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    AttentionArguments arguments;
    AttentionViews views;
    return read(params, problem, &arguments, &views);
  }

  // Also fills `given`, which later checks use.
  static flashmoe_status read(const Params& params, Problem* problem, AttentionArguments* given,
                              AttentionViews* given_views) {
    AttentionArguments& arguments = *given;
    AttentionViews& views = *given_views;
    arguments = AttentionArguments::of(params);
    arguments.merges = params.prior_out != nullptr;
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
  static double flops(const Problem& p) { return planned_flops(p); }
  static bool is_empty(const Problem& p) { return p.batch == 0 || p.seq_q == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char call[256];
    char scores[128];
    char options[32];
    print_attention(p, call, sizeof call);
    print_options(kScoreOptions<Params>, params, scores, sizeof scores);
    print_options(kOptions, params, options, sizeof options);
    char keys[48] = "";
    if (flashmoe::has_scaled_keys(p)) {
      std::snprintf(keys, sizeof keys, " keys=%s%s%s", dtype_name(p.k.dtype),
                    p.k_scale.data != nullptr ? ",k_scale" : "",
                    p.v_scale.data != nullptr ? ",v_scale" : "");
    }
    std::snprintf(text, size, "%s%s%s%s sinks=%s%s lse=%s", call, keys, scores, options,
                  p.sinks.data != nullptr ? "yes" : "no", BiasAndMaskText(p).text,
                  p.lse != nullptr ? "yes" : "no");
  }
};

// The same, with a partial result of other keys merged in.
struct AttentionMergeIn : AttentionForward {
  using Problem = AttentionMergeInProblem;
  static constexpr const auto& kFamilies = kAttentionMergeInFamilies.list;

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    AttentionProblem& attention = problem->attention;
    AttentionArguments arguments;
    AttentionViews views;
    if (params.prior_out == nullptr) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "prior_lse: got a tensor, accepted is none without prior_out");
    }
    FLASHMOE_TRY(read(params, &attention, &arguments, &views));
    FLASHMOE_TRY(read_prior(params, arguments, views, attention, &problem->merge));
    problem->device = attention.device;
    copy_kernel_name(params.kernel, &problem->kernel);
    divide_merge_in(views.q.shape[0], views.q.shape[arguments.seq_axis()], problem);
    return FLASHMOE_OK;
  }

  // out may be prior_out, and lse may be prior_lse.
  static Params params_apart(const Params& params) { return prior_apart(params); }

  static double flops(const Problem& p) { return AttentionForward::flops(p.attention); }
  static bool is_empty(const Problem& p) { return AttentionForward::is_empty(p.attention); }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    AttentionProblem shown = p.attention;
    shown.lse = p.merge.lse.data;  // the call's lse, not that of its own part
    AttentionForward::print(params, shown, text, size);
    const size_t used = std::strlen(text);
    std::snprintf(text + used, size - used, " prior=%s -> %s", dtype_name(p.merge.prior_out.dtype),
                  dtype_name(p.merge.out.dtype));
  }

 private:
  static flashmoe_status read_prior(const Params& params, const AttentionArguments& arguments,
                                    const AttentionViews& views, const AttentionProblem& attention,
                                    MergeStatesProblem* merge) {
    View view;
    Dtype dtype = attention.q.dtype;
    FLASHMOE_TRY(check_view("prior_out", params.prior_out, 4, &view));
    FLASHMOE_TRY(check_same_device("prior_out", *params.prior_out, "q", attention.device));
    FLASHMOE_TRY(dtype == Dtype::kFloat64
                     ? check_same_dtype("prior_out", *params.prior_out, "q", dtype)
                     : check_dtype("prior_out", *params.prior_out, &dtype));
    FLASHMOE_TRY(check_rows("prior_out", view, 4, dtype_bytes(dtype)));
    FLASHMOE_TRY(check_shape_of("prior_out", view, "out", views.out, arguments));
    set_rows(view, dtype, arguments, &merge->prior_out);
    FLASHMOE_TRY(check_row_numbers("prior_lse", params.prior_lse, arguments, views.q, attention,
                                   &view, &merge->prior_lse.strides));
    merge->prior_lse.data = view.data;
    return FLASHMOE_OK;
  }
};

// Whether a call has something to merge in. The params are not validated yet.
bool merges(const Params* params) {
  constexpr size_t kKnown = offsetof(Params, prior_lse) + sizeof params->prior_lse;
  return params != nullptr && params->struct_size >= kKnown &&
         (params->prior_out != nullptr || params->prior_lse != nullptr);
}

}  // namespace
}  // namespace flashmoe

using flashmoe::AttentionForward;
using flashmoe::AttentionMergeIn;

flashmoe_status flashmoe_attention_forward_plan(const flashmoe_attention_forward_params* params,
                                                flashmoe_plan* plan) {
  return flashmoe::merges(params) ? flashmoe::plan_operation<AttentionMergeIn>(params, plan)
                                  : flashmoe::plan_operation<AttentionForward>(params, plan);
}

flashmoe_status flashmoe_attention_forward_workspace_size(
    const flashmoe_attention_forward_params* params, size_t* bytes) {
  return flashmoe::merges(params) ? flashmoe::workspace_size_of<AttentionMergeIn>(params, bytes)
                                  : flashmoe::workspace_size_of<AttentionForward>(params, bytes);
}

flashmoe_status flashmoe_attention_forward(const flashmoe_attention_forward_params* params,
                                           void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::merges(params)
             ? flashmoe::run_operation<AttentionMergeIn>(params, workspace, workspace_size, stream)
             : flashmoe::run_operation<AttentionForward>(params, workspace, workspace_size, stream);
}
