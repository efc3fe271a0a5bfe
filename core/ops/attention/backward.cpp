// Attention backward: its options, its checks and its families. See core/operation.h for the rest.
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

using Params = flashmoe_attention_backward_params;

// They follow those of the scores.
constexpr Option<Params> kOptions[] = {
    Option<Params>::flag("accumulate", &Params::accumulate),
};

flashmoe_status check_dout(const AttentionArguments& arguments, const flashmoe_tensor* tensor,
                           const View& out, AttentionBackwardProblem* problem) {
  const Dtype dtype = problem->q.dtype;
  View dout;
  FLASHMOE_TRY(check_view("dout", tensor, 4, &dout));
  FLASHMOE_TRY(check_same_device("dout", *tensor, "q", problem->device));
  FLASHMOE_TRY(check_same_dtype("dout", *tensor, "q", dtype));
  FLASHMOE_TRY(check_rows("dout", dout, 4, dtype_bytes(dtype)));
  FLASHMOE_TRY(check_shape_of("dout", dout, "out", out, arguments));
  set_rows(dout, dtype, arguments, &problem->dout);
  return FLASHMOE_OK;
}

// Checks the gradient of `of`, if wanted.
flashmoe_status check_gradient(const char* name, const AttentionArguments& arguments,
                               const flashmoe_tensor* tensor, const char* of, const View& like,
                               const AttentionBackwardProblem& problem, RowsView<void>* rows) {
  if (tensor == nullptr) return FLASHMOE_OK;
  const Dtype dtype = problem.q.dtype;
  View view;
  FLASHMOE_TRY(check_view(name, tensor, 4, &view));
  FLASHMOE_TRY(check_same_device(name, *tensor, "q", problem.device));
  Dtype own;
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, "q", dtype, &own));
  FLASHMOE_TRY(check_rows(name, view, 4, dtype_bytes(own)));
  FLASHMOE_TRY(check_shape_of(name, view, of, like, arguments));
  FLASHMOE_TRY(check_no_overlap(name, view, 4));
  set_rows(view, own, arguments, rows);
  return FLASHMOE_OK;
}

flashmoe_status check_dsinks(const flashmoe_tensor* tensor, AttentionBackwardProblem* problem) {
  if (tensor == nullptr) return FLASHMOE_OK;
  if (problem->sinks.data == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "dsinks: got one, accepted without sinks is none");
  }
  HeadSums& dsinks = problem->dsinks;
  View view;
  FLASHMOE_TRY(check_view("dsinks", tensor, 1, &view));
  FLASHMOE_TRY(check_same_device("dsinks", *tensor, "q", problem->device));
  FLASHMOE_TRY(
      check_same_dtype_or_fp32("dsinks", *tensor, "sinks", problem->sinks.dtype, &dsinks.dtype));
  FLASHMOE_TRY(check_extent("dsinks", "number of heads", view.shape[0], "q", problem->heads_q));
  FLASHMOE_TRY(check_alignment("dsinks", view, static_cast<size_t>(dtype_bytes(dsinks.dtype))));
  FLASHMOE_TRY(check_no_overlap("dsinks", view, 1));
  dsinks.data = view.data;
  dsinks.stride = view.strides[0];
  return FLASHMOE_OK;
}

// Refuses tables that let sequences share keys: the gradient of such a key would be a sum over
// sequences.
flashmoe_status check_owners(const flashmoe_attention_sequences& sequences) {
  const auto absent = [](const char* name, const flashmoe_tensor* given) {
    if (given == nullptr) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_UNSUPPORTED,
                "%s: got one, accepted is none: keys that sequences may share have no "
                "gradients in this version",
                name);
  };
  FLASHMOE_TRY(absent("batch_index", sequences.batch_index));
  return absent("page_table", sequences.page_table);
}

struct AttentionBackward {
  using Params = flashmoe_attention_backward_params;
  using Problem = AttentionBackwardProblem;
  static constexpr char kName[] = "attention_backward";
  static constexpr char kParams[] = "flashmoe_attention_backward_params";
  static constexpr char kSizeFunction[] = "flashmoe_attention_backward_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, sequences);
  static constexpr std::array<TensorMember<Params>, 22> kTensors = {{
      {"dout", &Params::dout},
      {"q", &Params::q},
      {"k", &Params::k},
      {"v", &Params::v},
      {"out", &Params::out},
      {"lse", &Params::lse},
      {"dlse", &Params::dlse},
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
      {"dq", &Params::dq},
      {"dk", &Params::dk},
      {"dv", &Params::dv},
      {"dsinks", &Params::dsinks},
  }};
  static constexpr size_t kFirstOutput = 18;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "attention_backward_";
  static constexpr const AttentionBackwardFamily* kFamilies[] = {
#if FLASHMOE_WITH_SM90
      &kSm90AttentionBackward,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89AttentionBackward,
#endif
      &kCpuAttentionBackward,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    Problem& p = *problem;
    AttentionArguments arguments = AttentionArguments::of(params);
    FLASHMOE_TRY(check_options(kScoreOptions<Params>, params));
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_window(arguments));
    if (params.sequences != nullptr) {
      FLASHMOE_TRY(check_sequences(*params.sequences));
      arguments.sequences = params.sequences;
    }
    AttentionViews views;
    FLASHMOE_TRY(check_attention(arguments, problem, &views));
    if (params.sequences != nullptr) FLASHMOE_TRY(check_owners(*params.sequences));
    FLASHMOE_TRY(check_dout(arguments, params.dout, views.out, problem));
    View lse, dlse;
    FLASHMOE_TRY(check_row_numbers("lse", params.lse, arguments, views.q, p, &lse, &p.lse_strides));
    p.lse = lse.data;
    if (params.dlse != nullptr) {
      FLASHMOE_TRY(
          check_row_numbers("dlse", params.dlse, arguments, views.q, p, &dlse, &p.dlse_strides));
      p.dlse = dlse.data;
    }
    FLASHMOE_TRY(read_sinks(params.sinks, problem));
    FLASHMOE_TRY(read_bias_and_mask(params.attn_bias, params.attn_mask, params.sequences != nullptr,
                                    problem));
    if (params.dq == nullptr && params.dk == nullptr && params.dv == nullptr &&
        params.dsinks == nullptr) {
      return fail(
          FLASHMOE_ERROR_INVALID_ARGUMENT,
          "dq: got a null tensor, as dk, dv and dsinks did; one of them at least is required");
    }
    FLASHMOE_TRY(check_gradient("dq", arguments, params.dq, "q", views.q, p, &p.dq));
    FLASHMOE_TRY(check_gradient("dk", arguments, params.dk, "k", views.k, p, &p.dk));
    FLASHMOE_TRY(check_gradient("dv", arguments, params.dv, "v", views.v, p, &p.dv));
    FLASHMOE_TRY(check_dsinks(params.dsinks, problem));
    p.accumulate = params.accumulate != 0;
    return FLASHMOE_OK;
  }
  static double flops(const Problem& p) { return planned_flops(p); }
  static bool is_empty(const Problem& p) {
    if (p.sequences.given) return false;  // rows of no sequence are written, too
    return p.dsinks.data == nullptr && (p.batch == 0 || (p.seq_q == 0 && p.seq_k == 0));
  }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char call[256];
    char scores[128];
    char options[32];
    print_attention(p, call, sizeof call);
    print_options(kScoreOptions<Params>, params, scores, sizeof scores);
    print_options(kOptions, params, options, sizeof options);
    const auto dtype_of = [](const flashmoe_tensor* tensor, const auto& gradient) {
      return tensor != nullptr ? dtype_name(gradient.dtype) : "no";
    };
    std::snprintf(text, size, "%s%s%s%s dlse=%s dq=%s dk=%s dv=%s dsinks=%s", call, scores, options,
                  BiasAndMaskText(p).text, params.dlse != nullptr ? "yes" : "no",
                  dtype_of(params.dq, p.dq), dtype_of(params.dk, p.dk), dtype_of(params.dv, p.dv),
                  dtype_of(params.dsinks, p.dsinks));
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::AttentionBackward;

flashmoe_status flashmoe_attention_backward_plan(const flashmoe_attention_backward_params* params,
                                                 flashmoe_plan* plan) {
  return flashmoe::plan_operation<AttentionBackward>(params, plan);
}

flashmoe_status flashmoe_attention_backward_workspace_size(
    const flashmoe_attention_backward_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<AttentionBackward>(params, bytes);
}

flashmoe_status flashmoe_attention_backward(const flashmoe_attention_backward_params* params,
                                            void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<AttentionBackward>(params, workspace, workspace_size, stream);
}
