// Checking the tables of sequences: the checks of the call and its families. See core/operation.h
// for the rest.
#include <array>
#include <cstdio>

#include "core/backends.h"
#include "core/operation.h"
#include "core/ops/attention/sequences.h"
#include "core/option.h"

namespace flashmoe {
namespace {

using Params = flashmoe_check_sequences_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kAttentionLayouts),
    Option<Params>::reserved("reserved", &Params::reserved),
};

struct CheckSequences {
  using Params = flashmoe_check_sequences_params;
  using Problem = CheckSequencesProblem;
  static constexpr char kName[] = "check_sequences";
  static constexpr char kParams[] = "flashmoe_check_sequences_params";
  static constexpr char kSizeFunction[] = "flashmoe_check_sequences_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);
  static constexpr std::array<TensorMember<Params>, 10> kTensors = {{
      {"q", &Params::q},
      {"k", &Params::k},
      {"cu_seqlens_q", nullptr, table_of<&flashmoe_attention_sequences::cu_seqlens_q>},
      {"cu_seqlens_k", nullptr, table_of<&flashmoe_attention_sequences::cu_seqlens_k>},
      {"seqused_q", nullptr, table_of<&flashmoe_attention_sequences::seqused_q>},
      {"seqused_k", nullptr, table_of<&flashmoe_attention_sequences::seqused_k>},
      {"k_begin", nullptr, table_of<&flashmoe_attention_sequences::k_begin>},
      {"batch_index", nullptr, table_of<&flashmoe_attention_sequences::batch_index>},
      {"page_table", nullptr, table_of<&flashmoe_attention_sequences::page_table>},
      {"status", &Params::status},
  }};
  static constexpr size_t kFirstOutput = 9;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "check_sequences_";
  static constexpr const CheckSequencesFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaCheckSequences,
#endif
      &kCpuCheckSequences,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    FLASHMOE_TRY(check_options(kOptions, params));
    if (params.sequences == nullptr) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "sequences: got none, accepted are tables to check");
    }
    FLASHMOE_TRY(check_sequences(*params.sequences));
    FLASHMOE_TRY(read_tables(params, problem));
    FLASHMOE_TRY(read_status(params, problem));
    copy_kernel_name(params.kernel, &problem->kernel);
    return FLASHMOE_OK;
  }

  static double flops(const Problem&) { return 0; }
  static bool is_empty(const Problem& p) { return p.batch == 0; }

  static void print(const Params&, const Problem& p, char* text, size_t size) {
    const auto name = [](const Numbers& numbers, const char* is) {
      return numbers.data != nullptr ? is : "";
    };
    const SequenceTables& t = p.tables;
    std::snprintf(text, size, "sequences=%lld by=%s%s%s%s%s%s%s", static_cast<long long>(p.batch),
                  name(t.cu_seqlens_q, "cu_seqlens_q,"), name(t.cu_seqlens_k, "cu_seqlens_k,"),
                  name(t.seqused_q, "seqused_q,"), name(t.seqused_k, "seqused_k,"),
                  name(t.k_begin, "k_begin,"), name(t.batch_index, "batch_index,"),
                  name(t.page_table, "page_table,"));
  }

 private:
  // Reads the tables as the attention call does. q and k give only their extents.
  static flashmoe_status read_tables(const Params& params, Problem* problem) {
    AttentionArguments arguments = {};
    arguments.layout = params.layout;
    arguments.sequences = params.sequences;
    View q, k;
    FLASHMOE_TRY(check_view("q", params.q, 4, &q));
    FLASHMOE_TRY(check_device("q", *params.q, &problem->device));
    FLASHMOE_TRY(check_view("k", params.k, 4, &k));
    FLASHMOE_TRY(check_same_device("k", *params.k, "q", problem->device));
    AttentionProblem attention;
    clear(&attention);
    attention.device = problem->device;
    attention.batch = q.shape[0];
    attention.seq_q = q.shape[arguments.seq_axis()];
    attention.seq_k = k.shape[arguments.seq_axis()];
    FLASHMOE_TRY(read_sequences(arguments, q, k, &attention));
    problem->tables = attention.sequences;
    problem->tables.split_size = 0;
    problem->batch = attention.batch;
    problem->most_q = params.sequences->max_seqlen_q;
    problem->most_k = params.sequences->max_seqlen_k;
    return FLASHMOE_OK;
  }

  static flashmoe_status read_status(const Params& params, Problem* problem) {
    View view;
    FLASHMOE_TRY(check_view("status", params.status, 1, &view));
    FLASHMOE_TRY(check_same_device("status", *params.status, "q", problem->device));
    FLASHMOE_TRY(check_index_dtype("status", *params.status, nullptr));
    FLASHMOE_TRY(check_alignment("status", view, sizeof(int32_t)));
    if (view.shape[0] != problem->batch) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "status: got %lld numbers, accepted are %lld, one of each sequence",
                  static_cast<long long>(view.shape[0]), static_cast<long long>(problem->batch));
    }
    FLASHMOE_TRY(check_no_overlap("status", view, 1));
    problem->status = view.data;
    problem->status_step = view.strides[0];
    return FLASHMOE_OK;
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::CheckSequences;

flashmoe_status flashmoe_check_sequences_plan(const flashmoe_check_sequences_params* params,
                                              flashmoe_plan* plan) {
  return flashmoe::plan_operation<CheckSequences>(params, plan);
}

flashmoe_status flashmoe_check_sequences_workspace_size(
    const flashmoe_check_sequences_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<CheckSequences>(params, bytes);
}

flashmoe_status flashmoe_check_sequences(const flashmoe_check_sequences_params* params,
                                         void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<CheckSequences>(params, workspace, workspace_size, stream);
}
