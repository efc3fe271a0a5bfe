// One row of attention by plain arithmetic, for rows that the tensor cores cannot serve:
//
// - Rows of a mask that came out with an infinity or a NaN. Where a step holds keys that some row
//   does not see, the tensor cores spread one in V to that row, since they multiply it by a masked
//   probability and 0 * NaN is NaN. Here a row reads its visible keys only.
// - Rows with logits beyond kMostRowMax. Here scores are subtracted from each other before they are
//   scaled, so that no rounding comes between them.
#pragma once

#include <cfloat>

#include "core/attention.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/numeric/tanh.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe {

// The row's tensors: one query row, and its keys and values, of which it sees those from first_key
// to before `keys`.
struct FallbackRow {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  int64_t k_stride;  // elements
  int64_t v_stride;
  int keys;
  int dim;
  int dim_v;
  int first_key = 0;
  float cap_ratio = 0.0f;  // with a softcap scale / softcap, and scale_log2 is of softcap
};

// For a whole warp. Calls store(column, element) for every column of the output, and returns the
// row's log-sum-exp. scale_log2 multiplies the scores, or the capped ones.
template <class Element, int kDimV, class Store>
__device__ __forceinline__ float masked_row_fallback(const FallbackRow& row, float scale_log2,
                                                     Store store) {
  using Numeric = numeric::ElementTraits<Element>;
  constexpr int kLanes = kThreadsPerWarp;
  constexpr int kColumnsPerLane = ceil_div(kDimV, kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float acc[kColumnsPerLane] = {};
  float sum = 0.0f;
  float top = -FLT_MAX;
  // 2^((score - other) * scale_log2). Halves, since the difference of two finite scores may
  // overflow.
  const auto power = [&](float score, float other) {
    const float half = (0.5f * score - 0.5f * other) * scale_log2;
    return numeric::exp2_approx(half + half);
  };
  for (int first = row.first_key; first < row.keys; first += kLanes) {
    const int key = first + lane;
    float score = -INFINITY;
    if (key < row.keys) {
      score = 0.0f;
      for (int d = 0; d < row.dim; ++d) {
        score += Numeric::to_float(row.q[d]) * Numeric::to_float(row.k[key * row.k_stride + d]);
      }
      if (row.cap_ratio != 0.0f) score = numeric::tanh(score * row.cap_ratio);
    }
    float highest = fmaxf(score, top);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, mask));
    }
    const float factor = power(top, highest);
    top = highest;
    const float p = power(score, top);
    sum = sum * factor + p;
#pragma unroll
    for (int c = 0; c < kColumnsPerLane; ++c) acc[c] *= factor;
    for (int i = 0; i < kLanes && first + i < row.keys; ++i) {
      const float p_i = __shfl_sync(kFullWarp, p, i);
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) {
        const int column = c * kLanes + lane;
        if (column < row.dim_v) {
          acc[c] += p_i * Numeric::to_float(row.v[(first + i) * row.v_stride + column]);
        }
      }
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
#pragma unroll
  for (int c = 0; c < kColumnsPerLane; ++c) {
    const int column = c * kLanes + lane;
    if (column < row.dim_v) {
      const float value = row.keys > row.first_key ? acc[c] / sum : 0.0f;
      store(column, static_cast<uint16_t>(Numeric::pack(value, 0.0f)));
    }
  }
  if (row.keys <= row.first_key) return -INFINITY;
  return fmaf(log2f(sum), kLn2, top * (scale_log2 * kLn2));
}

}  // namespace flashmoe
