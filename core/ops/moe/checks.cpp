#include "core/ops/moe/checks.h"

#include <cmath>

namespace flashmoe {

flashmoe_status check_numbers(const char* name, const flashmoe_tensor* tensor, int rank,
                              const char* of, Dtype dtype, flashmoe_device device, View* view) {
  FLASHMOE_TRY(check_view(name, tensor, rank, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  const bool wide = dtype == Dtype::kFloat64;
  FLASHMOE_TRY(wide ? check_same_dtype(name, *tensor, of, dtype) : check_fp32(name, *tensor));
  FLASHMOE_TRY(check_contiguous(name, *view, rank));
  return check_alignment(name, *view, wide ? alignof(double) : alignof(float));
}

flashmoe_status check_numbers_or_fp32(const char* name, const flashmoe_tensor* tensor, int rank,
                                      const char* of, Dtype dtype, flashmoe_device device,
                                      View* view, Dtype* own) {
  *own = Dtype::kFloat32;
  if (dtype != Dtype::kFloat64) {
    return check_numbers(name, tensor, rank, of, *own, device, view);
  }
  FLASHMOE_TRY(check_view(name, tensor, rank, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, of, dtype, own));
  return check_numbers(name, tensor, rank, of, *own, device, view);
}

flashmoe_status check_int32_tensor(const char* name, const flashmoe_tensor* tensor, int rank,
                                   const char* of, flashmoe_device device, View* view) {
  FLASHMOE_TRY(check_view(name, tensor, rank, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_index_dtype(name, *tensor, nullptr));
  FLASHMOE_TRY(check_contiguous(name, *view, rank));
  return check_alignment(name, *view, alignof(int32_t));
}

flashmoe_status check_experts(const char* name, int64_t experts) {
  if (experts >= 1 && experts <= kMaxExperts) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %lld experts, accepted are 1 to %lld", name,
              static_cast<long long>(experts), static_cast<long long>(kMaxExperts));
}

flashmoe_status check_top_k(const char* name, int64_t top_k) {
  if (top_k >= 1 && top_k <= kMaxTopK) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: got %lld experts of a token, accepted are 1 to %lld", name,
              static_cast<long long>(top_k), static_cast<long long>(kMaxTopK));
}

flashmoe_status check_pairs(const char* name, int64_t tokens, int64_t top_k) {
  if (tokens <= kMostPairs / top_k) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: got %lld tokens with %lld experts each, accepted are at most 2^31 - 2^16 pairs",
              name, static_cast<long long>(tokens), static_cast<long long>(top_k));
}

flashmoe_status check_pair_rows(const char* name, int64_t pairs, int64_t columns) {
  constexpr int64_t kMostElements = INT64_MAX / 64;  // room for a few fp32 tensors
  if (pairs == 0 || columns <= kMostElements / pairs) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: got %lld columns for %lld pairs of a token and an expert, their number of bytes "
              "does not fit in 63 bits",
              name, static_cast<long long>(columns), static_cast<long long>(pairs));
}

flashmoe_status check_multiple(const char* name, const char* extent, int64_t got) {
  if (got >= kExtentMultiple && got % kExtentMultiple == 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: its %s is %lld, accepted are multiples of %lld",
              name, extent, static_cast<long long>(got), static_cast<long long>(kExtentMultiple));
}

flashmoe_status check_flag(const char* name, int32_t got) {
  if (got == 0 || got == 1) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %d, accepted are 0 and 1", name, got);
}

flashmoe_status check_finite(const char* name, float got) {
  if (std::isfinite(got)) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %g, accepted is a finite number", name,
              static_cast<double>(got));
}

flashmoe_status check_absent(const char* name, const flashmoe_tensor* tensor, const char* why) {
  if (tensor == nullptr) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got a tensor, accepted is none %s", name, why);
}

flashmoe_status check_no_scale(const char* name, const flashmoe_tensor* scale) {
  return check_absent(name, scale,
                      "with tensors of fp16, bf16, fp32 and fp64, which have no scales");
}

flashmoe_status check_matrix_layout(const char* name, const View& view, int rank,
                                    int64_t element_bytes) {
  const int unit_axis = view.strides[rank - 1] == 1 ? rank - 1 : rank - 2;
  if (view.strides[unit_axis] != 1) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: its last two dimensions have strides %lld and %lld, accepted is 1 for one of "
                "them",
                name, static_cast<long long>(view.strides[rank - 2]),
                static_cast<long long>(view.strides[rank - 1]));
  }
  FLASHMOE_TRY(check_alignment(name, view, kRowAlignment));
  for (int axis = 0; axis < rank; ++axis) {
    if (axis != unit_axis) FLASHMOE_TRY(check_aligned_stride(name, view, axis, element_bytes));
  }
  return FLASHMOE_OK;
}

flashmoe_status check_matrix(const char* name, const flashmoe_tensor* tensor, const char* of,
                             Dtype dtype, flashmoe_device device, View* view) {
  FLASHMOE_TRY(check_view(name, tensor, 3, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype(name, *tensor, of, dtype));
  FLASHMOE_TRY(check_experts(name, view->shape[0]));
  FLASHMOE_TRY(check_multiple(name, "number of rows", view->shape[1]));
  FLASHMOE_TRY(check_multiple(name, "number of columns", view->shape[2]));
  return check_matrix_layout(name, *view, 3, dtype_bytes(dtype));
}

ExpertMatrix rows_of(const View& matrix, Dtype dtype, int64_t first, int64_t step) {
  const char* data = static_cast<const char*>(matrix.data);
  return {data + first * matrix.strides[1] * dtype_bytes(dtype),
          matrix.strides[0],
          step * matrix.strides[1],
          matrix.strides[2],
          dtype,
          0};
}

flashmoe_status check_bias(const char* name, const flashmoe_tensor* tensor, const char* of,
                           Dtype dtype, flashmoe_device device, int64_t experts, int64_t rows,
                           const char* matrix, View* view, Dtype* bias_dtype) {
  FLASHMOE_TRY(check_view(name, tensor, 2, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, of, dtype, bias_dtype));
  FLASHMOE_TRY(check_extent(name, "number of experts", view->shape[0], matrix, experts));
  FLASHMOE_TRY(check_extent(name, "number of rows", view->shape[1], matrix, rows));
  FLASHMOE_TRY(check_last_stride(name, *view, 2));
  return check_alignment(name, *view, static_cast<size_t>(dtype_bytes(*bias_dtype)));
}

ExpertBias rows_of_bias(const View& bias, Dtype dtype, int64_t first, int64_t step) {
  return {static_cast<const char*>(bias.data) + first * dtype_bytes(dtype), bias.strides[0], step,
          dtype, 0};
}

flashmoe_status check_row_gradient(const char* name, const flashmoe_tensor* tensor, int rank,
                                   const char* of, const View& like, Dtype dtype,
                                   flashmoe_device device, TokenRows<void>* rows) {
  if (tensor == nullptr) return FLASHMOE_OK;
  View view;
  FLASHMOE_TRY(check_view(name, tensor, rank, &view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, of, dtype, &rows->dtype));
  FLASHMOE_TRY(check_rows(name, view, rank, dtype_bytes(rows->dtype)));
  if (rank == 3) {
    FLASHMOE_TRY(check_extent(name, "number of experts", view.shape[0], of, like.shape[0]));
  }
  FLASHMOE_TRY(
      check_extent(name, "number of rows", view.shape[rank - 2], of, like.shape[rank - 2]));
  FLASHMOE_TRY(
      check_extent(name, "number of columns", view.shape[rank - 1], of, like.shape[rank - 1]));
  FLASHMOE_TRY(check_no_overlap(name, view, rank));
  rows->data = view.data;
  rows->row_stride = view.strides[rank - 2];
  rows->expert_stride = rank == 3 ? view.strides[0] : 0;
  return FLASHMOE_OK;
}

flashmoe_status check_matrix_gradient(const char* name, const flashmoe_tensor* tensor,
                                      const char* of, const int64_t (&shape)[3], Dtype dtype,
                                      flashmoe_device device, MatrixGradient* gradient) {
  if (tensor == nullptr) return FLASHMOE_OK;
  View view;
  FLASHMOE_TRY(check_view(name, tensor, 3, &view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, of, dtype, &gradient->dtype));
  static constexpr const char* kExtents[] = {"number of experts", "number of rows",
                                             "number of columns"};
  for (int axis = 0; axis < 3; ++axis) {
    FLASHMOE_TRY(check_extent(name, kExtents[axis], view.shape[axis], of, shape[axis]));
  }
  FLASHMOE_TRY(check_matrix_layout(name, view, 3, dtype_bytes(gradient->dtype)));
  FLASHMOE_TRY(check_no_overlap(name, view, 3));
  gradient->data = view.data;
  gradient->expert_stride = view.strides[0];
  gradient->row_stride = view.strides[1];
  gradient->column_stride = view.strides[2];
  return FLASHMOE_OK;
}

flashmoe_status check_bias_gradient(const char* name, const flashmoe_tensor* tensor,
                                    const char* matrix, int64_t experts, int64_t rows,
                                    const char* of, Dtype dtype, flashmoe_device device,
                                    BiasGradient* gradient) {
  if (tensor == nullptr) return FLASHMOE_OK;
  View view;
  FLASHMOE_TRY(check_view(name, tensor, 2, &view));
  FLASHMOE_TRY(check_same_device(name, *tensor, of, device));
  FLASHMOE_TRY(check_same_dtype_or_fp32(name, *tensor, of, dtype, &gradient->dtype));
  FLASHMOE_TRY(check_extent(name, "number of experts", view.shape[0], matrix, experts));
  FLASHMOE_TRY(check_extent(name, "number of rows", view.shape[1], matrix, rows));
  FLASHMOE_TRY(check_last_stride(name, view, 2));
  FLASHMOE_TRY(check_alignment(name, view, static_cast<size_t>(dtype_bytes(gradient->dtype))));
  FLASHMOE_TRY(check_no_overlap(name, view, 2));
  gradient->data = view.data;
  gradient->expert_stride = view.strides[0];
  return FLASHMOE_OK;
}

}  // namespace flashmoe
