// Checks that the mixture-of-experts operations share.
#pragma once

#include <cstdint>

#include "core/checks.h"
#include "core/ops/moe/problem.h"

namespace flashmoe {

inline constexpr int64_t kExtentMultiple = 8;  // for H, I, N and K of a product
// The limit for pairs, and for rows of a product: kernels round them up to tiles and steps in 32
// bits.
inline constexpr int64_t kMostPairs = (int64_t{1} << 31) - (int64_t{1} << 16);

// Checks a contiguous tensor on `device`, which is that of `of`. Its elements are int32, or
// numbers: fp64 if `dtype` is fp64, else fp32.
flashmoe_status check_numbers(const char* name, const flashmoe_tensor* tensor, int rank,
                              const char* of, Dtype dtype, flashmoe_device device, View* view);
// The same, but also accepts fp32 if `dtype` is fp64.
flashmoe_status check_numbers_or_fp32(const char* name, const flashmoe_tensor* tensor, int rank,
                                      const char* of, Dtype dtype, flashmoe_device device,
                                      View* view, Dtype* own);
flashmoe_status check_int32_tensor(const char* name, const flashmoe_tensor* tensor, int rank,
                                   const char* of, flashmoe_device device, View* view);

flashmoe_status check_experts(const char* name, int64_t experts);
flashmoe_status check_top_k(const char* name, int64_t top_k);
flashmoe_status check_pairs(const char* name, int64_t tokens, int64_t top_k);

// Checks that a row of `columns` per pair, as workspaces hold it, has a number of bytes that fits.
flashmoe_status check_pair_rows(const char* name, int64_t pairs, int64_t columns);

// At least one, and a multiple of kExtentMultiple.
flashmoe_status check_multiple(const char* name, const char* extent, int64_t got);

// 0 or 1.
flashmoe_status check_flag(const char* name, int32_t got);

flashmoe_status check_finite(const char* name, float got);

// Sets the narrow or the wide pointer of a problem to checked numbers.
template <class Narrow, class Wide>
void set_numbers(const View& view, Dtype dtype, Narrow** narrow, Wide** wide) {
  if (dtype == Dtype::kFloat64) {
    *wide = static_cast<Wide*>(view.data);
  } else {
    *narrow = static_cast<Narrow*>(view.data);
  }
}

// Checks an argument that must be null: "selection_bias: got a tensor, accepted is NULL without
// ...".
flashmoe_status check_absent(const char* name, const flashmoe_tensor* tensor, const char* why);

// Refuses scales: the ABI has fields for them, but no kernel reads them.
flashmoe_status check_no_scale(const char* name, const flashmoe_tensor* scale);

// Checks weights that are not empty: one of the last two strides is 1, the others and the address
// are multiples of 16 bytes.
flashmoe_status check_matrix_layout(const char* name, const View& view, int rank,
                                    int64_t element_bytes);

// Checks weights [experts, rows, columns] of `dtype` with that layout.
flashmoe_status check_matrix(const char* name, const flashmoe_tensor* tensor, const char* of,
                             Dtype dtype, flashmoe_device device, View* view);

// The rows of a checked matrix from row `first`, every `step`th.
ExpertMatrix rows_of(const View& matrix, Dtype dtype, int64_t first, int64_t step);

// Checks [experts, rows] with the extents of `matrix`, fp32 or `dtype`, last stride 1.
flashmoe_status check_bias(const char* name, const flashmoe_tensor* tensor, const char* of,
                           Dtype dtype, flashmoe_device device, int64_t experts, int64_t rows,
                           const char* matrix, View* view, Dtype* bias_dtype);
ExpertBias rows_of_bias(const View& bias, Dtype dtype, int64_t first, int64_t step);

// ---- gradients: outputs of `dtype` or fp32; a null one is not wanted ----------------------------

// [tokens or rows, columns], shaped as `like`; with rows per expert, [experts, ...].
flashmoe_status check_row_gradient(const char* name, const flashmoe_tensor* tensor, int rank,
                                   const char* of, const View& like, Dtype dtype,
                                   flashmoe_device device, TokenRows<void>* rows);

// [experts, rows, columns], with the layouts of a matrix.
flashmoe_status check_matrix_gradient(const char* name, const flashmoe_tensor* tensor,
                                      const char* of, const int64_t (&shape)[3], Dtype dtype,
                                      flashmoe_device device, MatrixGradient* gradient);

// [experts, rows] with the extents of `matrix`, last stride 1.
flashmoe_status check_bias_gradient(const char* name, const flashmoe_tensor* tensor,
                                    const char* matrix, int64_t experts, int64_t rows,
                                    const char* of, Dtype dtype, flashmoe_device device,
                                    BiasGradient* gradient);

}  // namespace flashmoe
