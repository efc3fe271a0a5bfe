// The merge of partial attention results: its checks and its families. See core/operation.h for the
// rest.
#include <array>
#include <cstdio>

#include "core/backends.h"
#include "core/operation.h"
#include "core/ops/attention/checks.h"
#include "core/option.h"

namespace flashmoe {
namespace {

using Params = flashmoe_merge_states_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kAttentionLayouts),
    Option<Params>::reserved("reserved", &Params::reserved),
};

// What the tensors of a call share: extents, dtype and device of `outs`.
class Common {
 public:
  Common(MergeStatesProblem* problem, int32_t layout)
      : p_(*problem), bhsd_(layout == FLASHMOE_LAYOUT_BHSD) {}

  int seq_axis() const { return bhsd_ ? 2 : 1; }
  int head_axis() const { return bhsd_ ? 1 : 2; }
  bool is_fp64() const { return p_.outs.dtype == Dtype::kFloat64; }

  // outs: one partial, or several with an axis in front.
  flashmoe_status read_outs(const flashmoe_tensor* tensor, int* lead) {
    const int rank = tensor != nullptr ? tensor->ndim : 5;
    if (rank != 4 && rank != 5) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "outs: got %d dimensions, accepted are 4 (one partial) and 5 (partials in front)",
                  rank);
    }
    *lead = rank - 4;
    View view;
    FLASHMOE_TRY(check_view("outs", tensor, rank, &view));
    FLASHMOE_TRY(check_device("outs", *tensor, &p_.device));
    FLASHMOE_TRY(is_on_cuda(p_.device)
                     ? check_dtype("outs", *tensor, &p_.outs.dtype)
                     : check_first_dtype("outs", *tensor, p_.device, &p_.outs.dtype));
    FLASHMOE_TRY(check_rows("outs", view, rank, dtype_bytes(p_.outs.dtype)));
    p_.partials = *lead == 1 ? view.shape[0] : 1;
    p_.outs_stride = *lead == 1 ? view.strides[0] : 0;
    const int64_t* const shape = view.shape + *lead;
    p_.batch = shape[0];
    p_.seq = shape[seq_axis()];
    p_.heads = shape[head_axis()];
    p_.dim_v = shape[3];
    if (p_.dim_v < kHeadDimMultiple || p_.dim_v % kHeadDimMultiple != 0) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "outs: its head dimension is %lld, accepted are multiples of %lld",
                  static_cast<long long>(p_.dim_v), static_cast<long long>(kHeadDimMultiple));
    }
    p_.outs.data = view.data;
    p_.outs.strides = strides_of(view.strides + *lead);
    return FLASHMOE_OK;
  }

  // lses, with as many leading axes as outs.
  flashmoe_status read_lses(const flashmoe_tensor* tensor, int lead) {
    View view;
    FLASHMOE_TRY(check_numbers("lses", tensor, lead, &view));
    if (lead == 1) {
      FLASHMOE_TRY(check_extent("lses", "number of partials", view.shape[0], "outs", p_.partials));
      p_.lses_stride = view.strides[0];
    }
    set_numbers(view, lead, &p_.lses);
    return FLASHMOE_OK;
  }

  template <class Data>
  flashmoe_status read_rows(const char* name, const flashmoe_tensor* tensor, RowsView<Data>* rows,
                            View* view) {
    FLASHMOE_TRY(check_view(name, tensor, 4, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "outs", p_.device));
    if (is_fp64()) {
      FLASHMOE_TRY(check_same_dtype(name, *tensor, "outs", Dtype::kFloat64));
      rows->dtype = Dtype::kFloat64;
    } else {
      FLASHMOE_TRY(check_dtype(name, *tensor, &rows->dtype));
    }
    FLASHMOE_TRY(check_rows(name, *view, 4, dtype_bytes(rows->dtype)));
    FLASHMOE_TRY(check_extent(name, "batch", view->shape[0], "outs", p_.batch));
    FLASHMOE_TRY(check_extent(name, "sequence length", view->shape[seq_axis()], "outs", p_.seq));
    FLASHMOE_TRY(check_extent(name, "number of heads", view->shape[head_axis()], "outs", p_.heads));
    FLASHMOE_TRY(check_extent(name, "head dimension", view->shape[3], "outs", p_.dim_v));
    rows->data = view->data;
    rows->strides = strides_of(view->strides);
    return FLASHMOE_OK;
  }

  template <class Data>
  flashmoe_status read_numbers(const char* name, const flashmoe_tensor* tensor,
                               RowNumbers<Data>* numbers, View* view) {
    FLASHMOE_TRY(check_numbers(name, tensor, 0, view));
    set_numbers(*view, 0, numbers);
    return FLASHMOE_OK;
  }

 private:
  RowStrides strides_of(const int64_t* strides) const {
    return {strides[0], strides[seq_axis()], strides[head_axis()]};
  }

  // [batch, heads, seq] after `lead` leading axes.
  flashmoe_status check_numbers(const char* name, const flashmoe_tensor* tensor, int lead,
                                View* view) {
    FLASHMOE_TRY(check_view(name, tensor, lead + 3, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "outs", p_.device));
    FLASHMOE_TRY(is_fp64() ? check_same_dtype(name, *tensor, "outs", Dtype::kFloat64)
                           : check_fp32(name, *tensor));
    const int64_t* const shape = view->shape + lead;
    FLASHMOE_TRY(check_extent(name, "batch", shape[0], "outs", p_.batch));
    FLASHMOE_TRY(check_extent(name, "number of heads", shape[1], "outs", p_.heads));
    FLASHMOE_TRY(check_extent(name, "sequence length", shape[2], "outs", p_.seq));
    return check_alignment(name, *view, is_fp64() ? alignof(double) : alignof(float));
  }

  template <class Data>
  static void set_numbers(const View& view, int lead, RowNumbers<Data>* numbers) {
    const int64_t* const strides = view.strides + lead;
    numbers->data = view.data;
    numbers->strides = {strides[0], strides[2], strides[1]};
  }

  MergeStatesProblem& p_;
  const bool bhsd_;
};

struct MergeStates {
  using Params = flashmoe_merge_states_params;
  using Problem = MergeStatesProblem;
  static constexpr char kName[] = "merge_states";
  static constexpr char kParams[] = "flashmoe_merge_states_params";
  static constexpr char kSizeFunction[] = "flashmoe_merge_states_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);
  static constexpr std::array<TensorMember<Params>, 6> kTensors = {{
      {"outs", &Params::outs},
      {"lses", &Params::lses},
      {"prior_out", &Params::prior_out},
      {"prior_lse", &Params::prior_lse},
      {"out", &Params::out},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 4;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "merge_states_";
  static constexpr const MergeStatesFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaMergeStates,
#endif
      &kCpuMergeStates,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    Problem& p = *problem;
    FLASHMOE_TRY(check_options(kOptions, params));
    Common common(problem, params.layout);
    int lead = 0;
    FLASHMOE_TRY(common.read_outs(params.outs, &lead));
    FLASHMOE_TRY(common.read_lses(params.lses, lead));
    View view;
    if (params.prior_out != nullptr) {
      FLASHMOE_TRY(common.read_rows("prior_out", params.prior_out, &p.prior_out, &view));
      FLASHMOE_TRY(common.read_numbers("prior_lse", params.prior_lse, &p.prior_lse, &view));
    } else if (params.prior_lse != nullptr) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "prior_lse: got a tensor, accepted is none without prior_out");
    }
    FLASHMOE_TRY(common.read_rows("out", params.out, &p.out, &view));
    FLASHMOE_TRY(check_no_overlap("out", view, 4));
    if (params.lse != nullptr) {
      FLASHMOE_TRY(common.read_numbers("lse", params.lse, &p.lse, &view));
      FLASHMOE_TRY(check_no_overlap("lse", view, 3));
    }
    copy_kernel_name(params.kernel, &p.kernel);
    return FLASHMOE_OK;
  }

  // out may be prior_out, and lse may be prior_lse.
  static Params params_apart(const Params& params) { return prior_apart(params); }

  static double flops(const Problem& p) {
    const double partials = static_cast<double>(p.partials) + (p.prior_out.data != nullptr ? 1 : 0);
    return 2.0 * partials * static_cast<double>(p.batch) * static_cast<double>(p.seq) *
           static_cast<double>(p.heads) * static_cast<double>(p.dim_v);
  }
  static bool is_empty(const Problem& p) { return p.batch == 0 || p.seq == 0 || p.heads == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[64];
    print_options(kOptions, params, options, sizeof options);
    std::snprintf(
        text, size,
        "partials=%lld prior=%s batch=%lld seq=%lld heads=%lld dim=%lld %s -> %s%s lse=%s",
        static_cast<long long>(p.partials),
        p.prior_out.data != nullptr ? dtype_name(p.prior_out.dtype) : "no",
        static_cast<long long>(p.batch), static_cast<long long>(p.seq),
        static_cast<long long>(p.heads), static_cast<long long>(p.dim_v), dtype_name(p.outs.dtype),
        dtype_name(p.out.dtype), options, p.lse.data != nullptr ? "yes" : "no");
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::MergeStates;

flashmoe_status flashmoe_merge_states_plan(const flashmoe_merge_states_params* params,
                                           flashmoe_plan* plan) {
  return flashmoe::plan_operation<MergeStates>(params, plan);
}

flashmoe_status flashmoe_merge_states_workspace_size(const flashmoe_merge_states_params* params,
                                                     size_t* bytes) {
  return flashmoe::workspace_size_of<MergeStates>(params, bytes);
}

flashmoe_status flashmoe_merge_states(const flashmoe_merge_states_params* params, void* workspace,
                                      size_t workspace_size, void* stream) {
  return flashmoe::run_operation<MergeStates>(params, workspace, workspace_size, stream);
}
