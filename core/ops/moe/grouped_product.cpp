// The grouped product (grouped GEMM): its checks and its families. See core/operation.h for the
// rest.
#include <cstdio>

#include "core/ops/moe/checks.h"
#include "core/ops/moe/operations.h"

namespace flashmoe {
namespace {

// Reads the rows of each expert: offsets with a rank 2 x, counts with a rank 3 x.
flashmoe_status read_rows(const flashmoe_grouped_product_params& params, int* rank) {
  if (params.x != nullptr && params.x->ndim != 2 && params.x->ndim != 3) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "x: got %d dimensions, accepted are 2 (with offsets) and 3 (with counts)",
                params.x->ndim);
  }
  *rank = params.x != nullptr ? params.x->ndim : 2;
  if (*rank == 2) return check_absent("counts", params.counts, "with a rank 2 x");
  return check_absent("offsets", params.offsets, "with a rank 3 x");
}

}  // namespace

flashmoe_status GroupedProduct::make_problem(const Params& params, Problem* problem) {
  Problem& p = *problem;
  int rank = 0;
  FLASHMOE_TRY(check_no_scale("x_scale", params.x_scale));
  FLASHMOE_TRY(check_no_scale("w_scale", params.w_scale));
  FLASHMOE_TRY(read_rows(params, &rank));
  const int row_axis = rank - 2;
  View x, w, out, rows;
  FLASHMOE_TRY(check_view("x", params.x, rank, &x));
  FLASHMOE_TRY(check_device("x", *params.x, &p.device));
  FLASHMOE_TRY(check_first_dtype("x", *params.x, p.device, &p.x.dtype));
  const int64_t bytes = dtype_bytes(p.x.dtype);
  FLASHMOE_TRY(check_rows("x", x, rank, bytes));
  p.rows = x.shape[row_axis];
  p.columns = x.shape[rank - 1];
  FLASHMOE_TRY(check_multiple("x", "number of columns", p.columns));
  if (p.rows > kMostPairs) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got %lld rows, accepted are at most 2^31 - 2^16", "x",
                static_cast<long long>(p.rows));
  }
  FLASHMOE_TRY(check_matrix("w", params.w, "x", p.x.dtype, p.device, &w));
  p.experts = static_cast<int32_t>(w.shape[0]);
  p.out_columns = w.shape[1];
  FLASHMOE_TRY(check_extent("w", "number of columns", w.shape[2], "x", p.columns));
  if (rank == 3) {
    FLASHMOE_TRY(check_extent("x", "number of experts", x.shape[0], "w", p.experts));
  }
  if (params.bias != nullptr) {
    View bias;
    Dtype dtype;
    FLASHMOE_TRY(check_bias("bias", params.bias, "x", p.x.dtype, p.device, p.experts, p.out_columns,
                            "w", &bias, &dtype));
    p.bias = rows_of_bias(bias, dtype, 0, 1);
  }
  if (rank == 2) {
    FLASHMOE_TRY(check_int32_tensor("offsets", params.offsets, 1, "x", p.device, &rows));
    FLASHMOE_TRY(check_extent("offsets", "number of experts and one more", rows.shape[0], "w",
                              int64_t{p.experts} + 1));
    p.offsets = static_cast<const int32_t*>(rows.data);
  } else {
    FLASHMOE_TRY(check_int32_tensor("counts", params.counts, 1, "x", p.device, &rows));
    FLASHMOE_TRY(check_extent("counts", "number of experts", rows.shape[0], "w", p.experts));
    p.counts = static_cast<const int32_t*>(rows.data);
  }
  FLASHMOE_TRY(check_view("out", params.out, rank, &out));
  FLASHMOE_TRY(check_same_device("out", *params.out, "x", p.device));
  FLASHMOE_TRY(check_same_dtype("out", *params.out, "x", p.x.dtype));
  FLASHMOE_TRY(check_rows("out", out, rank, bytes));
  if (rank == 3) {
    FLASHMOE_TRY(check_extent("out", "number of experts", out.shape[0], "w", p.experts));
  }
  FLASHMOE_TRY(check_extent("out", "number of rows", out.shape[row_axis], "x", p.rows));
  FLASHMOE_TRY(
      check_extent("out", "number of columns", out.shape[rank - 1], "w's rows", p.out_columns));
  FLASHMOE_TRY(check_no_overlap("out", out, rank));

  p.x.data = x.data;
  p.x.row_stride = p.rows > 1 ? x.strides[row_axis] : p.columns;  // the stride of a single row may
                                                                  // be anything
  p.x.expert_stride = rank == 3 ? x.strides[0] : 0;
  p.out.data = out.data;
  p.out.dtype = p.x.dtype;
  p.out.row_stride = out.strides[row_axis];
  p.out.expert_stride = rank == 3 ? out.strides[0] : 0;
  p.w = rows_of(w, p.x.dtype, 0, 1);
  copy_kernel_name(params.kernel, &p.kernel);
  return FLASHMOE_OK;
}

double GroupedProduct::flops(const Problem& p) {
  const double rows =
      static_cast<double>(p.rows) * (p.counts != nullptr ? static_cast<double>(p.experts) : 1.0);
  return 2.0 * rows * static_cast<double>(p.columns) * static_cast<double>(p.out_columns);
}

void GroupedProduct::print(const Params&, const Problem& p, char* text, size_t size) {
  std::snprintf(text, size, "rows=%lld%s columns=%lld/%lld experts=%d %s bias=%s",
                static_cast<long long>(p.rows), p.counts != nullptr ? " each" : "",
                static_cast<long long>(p.columns), static_cast<long long>(p.out_columns), p.experts,
                dtype_name(p.x.dtype), p.bias.data != nullptr ? "yes" : "no");
}

}  // namespace flashmoe

using flashmoe::GroupedProduct;

flashmoe_status flashmoe_grouped_product_plan(const flashmoe_grouped_product_params* params,
                                              flashmoe_plan* plan) {
  return flashmoe::plan_operation<GroupedProduct>(params, plan);
}

flashmoe_status flashmoe_grouped_product_workspace_size(
    const flashmoe_grouped_product_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<GroupedProduct>(params, bytes);
}

flashmoe_status flashmoe_grouped_product(const flashmoe_grouped_product_params* params,
                                         void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<GroupedProduct>(params, workspace, workspace_size, stream);
}
