// The grouped product, backward: its checks and its families. See core/operation.h for the rest.
#include <array>
#include <cstdio>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"
#include "core/option.h"

namespace flashmoe {
namespace {

using Params = flashmoe_grouped_product_backward_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::flag("accumulate", &Params::accumulate),
    Option<Params>::reserved("reserved", &Params::reserved),
};

// Reads how rows belong to experts: offsets with a rank 2 dout, counts with a rank 3 dout.
flashmoe_status read_rank(const Params& params, int* rank) {
  if (params.dout != nullptr && params.dout->ndim != 2 && params.dout->ndim != 3) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "dout: got %d dimensions, accepted are 2 (with offsets) and 3 (with counts)",
                params.dout->ndim);
  }
  *rank = params.dout != nullptr ? params.dout->ndim : 2;
  if (*rank == 2) return check_absent("counts", params.counts, "with a rank 2 dout");
  return check_absent("offsets", params.offsets, "with a rank 3 dout");
}

flashmoe_status check_needed(const Params& params) {
  if (params.dx == nullptr && params.dw == nullptr && params.dbias == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "dx: got a null tensor, as dw and dbias did; one of them at least is required");
  }
  if (params.dx != nullptr && params.w == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "w: got a null tensor, with dx it is required");
  }
  if (params.dw != nullptr && params.x == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "x: got a null tensor, with dw it is required");
  }
  return FLASHMOE_OK;
}

flashmoe_status read_x(const Params& params, int rank, const View& dout,
                       GroupedProductBackwardProblem* p) {
  View x;
  FLASHMOE_TRY(check_view("x", params.x, rank, &x));
  FLASHMOE_TRY(check_same_device("x", *params.x, "dout", p->device));
  FLASHMOE_TRY(check_same_dtype("x", *params.x, "dout", p->dout.dtype));
  FLASHMOE_TRY(check_rows("x", x, rank, dtype_bytes(p->dout.dtype)));
  if (rank == 3) {
    FLASHMOE_TRY(check_extent("x", "number of experts", x.shape[0], "dout", dout.shape[0]));
  }
  FLASHMOE_TRY(check_extent("x", "number of rows", x.shape[rank - 2], "dout", p->rows));
  FLASHMOE_TRY(check_multiple("x", "number of columns", x.shape[rank - 1]));
  p->columns = x.shape[rank - 1];
  p->x.data = x.data;
  p->x.dtype = p->dout.dtype;
  p->x.row_stride = p->rows > 1 ? x.strides[rank - 2] : p->columns;
  p->x.expert_stride = rank == 3 ? x.strides[0] : 0;
  return FLASHMOE_OK;
}

flashmoe_status read_w(const Params& params, GroupedProductBackwardProblem* p) {
  View w;
  FLASHMOE_TRY(check_matrix("w", params.w, "dout", p->dout.dtype, p->device, &w));
  FLASHMOE_TRY(check_extent("w", "number of experts", w.shape[0],
                            p->counts != nullptr ? "counts" : "offsets, less one,", p->experts));
  FLASHMOE_TRY(check_extent("w", "number of rows", w.shape[1], "dout's columns", p->out_columns));
  if (p->columns != 0) {
    FLASHMOE_TRY(check_extent("w", "number of columns", w.shape[2], "x", p->columns));
  }
  p->columns = w.shape[2];
  p->w = rows_of(w, p->dout.dtype, 0, 1);
  return FLASHMOE_OK;
}

struct GroupedProductBackward {
  using Params = flashmoe_grouped_product_backward_params;
  using Problem = GroupedProductBackwardProblem;
  static constexpr char kName[] = "grouped_product_backward";
  static constexpr char kParams[] = "flashmoe_grouped_product_backward_params";
  static constexpr char kSizeFunction[] = "flashmoe_grouped_product_backward_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);

  static constexpr std::array<TensorMember<Params>, 8> kTensors = {{
      {"dout", &Params::dout},
      {"x", &Params::x},
      {"w", &Params::w},
      {"offsets", &Params::offsets},
      {"counts", &Params::counts},
      {"dx", &Params::dx},
      {"dw", &Params::dw},
      {"dbias", &Params::dbias},
  }};
  static constexpr size_t kFirstOutput = 5;
  static constexpr size_t kGpuAlignment = 256;
  static constexpr const char* kKernelPrefix = nullptr;
  static constexpr const GroupedProductBackwardFamily* kFamilies[] = {
#if FLASHMOE_WITH_SM90
      &kSm90GroupedProductBackward,
#endif
#if FLASHMOE_WITH_CUDA
      &kSm89GroupedProductBackward,
#endif
      &kCpuGroupedProductBackward,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    Problem& p = *problem;
    int rank = 0;
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(read_rank(params, &rank));
    View dout, rows;
    FLASHMOE_TRY(check_view("dout", params.dout, rank, &dout));
    FLASHMOE_TRY(check_device("dout", *params.dout, &p.device));
    FLASHMOE_TRY(check_first_dtype("dout", *params.dout, p.device, &p.dout.dtype));
    FLASHMOE_TRY(check_rows("dout", dout, rank, dtype_bytes(p.dout.dtype)));
    FLASHMOE_TRY(check_needed(params));
    p.rows = dout.shape[rank - 2];
    p.out_columns = dout.shape[rank - 1];
    FLASHMOE_TRY(check_multiple("dout", "number of columns", p.out_columns));
    if (p.rows > kMostPairs) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "dout: its number of rows is %lld, accepted are at most 2^31 - 2^16",
                  static_cast<long long>(p.rows));
    }
    if (rank == 2) {
      FLASHMOE_TRY(check_int32_tensor("offsets", params.offsets, 1, "dout", p.device, &rows));
      FLASHMOE_TRY(check_experts("offsets", rows.shape[0] - 1));
      p.experts = static_cast<int32_t>(rows.shape[0] - 1);
      p.offsets = static_cast<const int32_t*>(rows.data);
    } else {
      FLASHMOE_TRY(check_int32_tensor("counts", params.counts, 1, "dout", p.device, &rows));
      FLASHMOE_TRY(check_experts("counts", rows.shape[0]));
      p.experts = static_cast<int32_t>(rows.shape[0]);
      p.counts = static_cast<const int32_t*>(rows.data);
      FLASHMOE_TRY(check_extent("dout", "number of experts", dout.shape[0], "counts", p.experts));
      FLASHMOE_TRY(check_pair_rows("dout", p.rows, p.experts));
    }
    p.dout.data = dout.data;
    p.dout.row_stride = p.rows > 1 ? dout.strides[rank - 2] : p.out_columns;
    p.dout.expert_stride = rank == 3 ? dout.strides[0] : 0;
    if (params.x != nullptr) FLASHMOE_TRY(read_x(params, rank, dout, &p));
    if (params.w != nullptr) FLASHMOE_TRY(read_w(params, &p));
    View like = dout;
    like.shape[rank - 1] = p.columns;
    FLASHMOE_TRY(check_row_gradient("dx", params.dx, rank, params.x != nullptr ? "x" : "w", like,
                                    p.dout.dtype, p.device, &p.dx));
    const int64_t shape[] = {p.experts, p.out_columns, p.columns};
    FLASHMOE_TRY(check_matrix_gradient("dw", params.dw, params.w != nullptr ? "w" : "x", shape,
                                       p.dout.dtype, p.device, &p.dw));
    FLASHMOE_TRY(check_bias_gradient("dbias", params.dbias, "dout", p.experts, p.out_columns,
                                     "dout", p.dout.dtype, p.device, &p.dbias));
    p.accumulate = params.accumulate != 0;
    copy_kernel_name(params.kernel, &p.kernel);
    return FLASHMOE_OK;
  }

  static double flops(const Problem& p) {
    const double rows =
        static_cast<double>(p.rows) * (p.counts != nullptr ? static_cast<double>(p.experts) : 1.0);
    const double products = (p.dx.data != nullptr ? 1.0 : 0.0) + (p.dw.data != nullptr ? 1.0 : 0.0);
    return 2.0 * products * rows * static_cast<double>(p.columns) *
           static_cast<double>(p.out_columns);
  }

  static bool is_empty(const Problem&) { return false; }  // dw is written without rows too

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[32];
    print_options(kOptions, params, options, sizeof options);
    const auto dtype_of = [](const auto& gradient) {
      return gradient.data != nullptr ? dtype_name(gradient.dtype) : "no";
    };
    std::snprintf(text, size, "rows=%lld%s columns=%lld/%lld experts=%d %s%s dx=%s dw=%s dbias=%s",
                  static_cast<long long>(p.rows), p.counts != nullptr ? " each" : "",
                  static_cast<long long>(p.columns), static_cast<long long>(p.out_columns),
                  p.experts, dtype_name(p.dout.dtype), options, dtype_of(p.dx), dtype_of(p.dw),
                  dtype_of(p.dbias));
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::GroupedProductBackward;

flashmoe_status flashmoe_grouped_product_backward_plan(
    const flashmoe_grouped_product_backward_params* params, flashmoe_plan* plan) {
  return flashmoe::plan_operation<GroupedProductBackward>(params, plan);
}

flashmoe_status flashmoe_grouped_product_backward_workspace_size(
    const flashmoe_grouped_product_backward_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<GroupedProductBackward>(params, bytes);
}

flashmoe_status flashmoe_grouped_product_backward(
    const flashmoe_grouped_product_backward_params* params, void* workspace, size_t workspace_size,
    void* stream) {
  return flashmoe::run_operation<GroupedProductBackward>(params, workspace, workspace_size, stream);
}
