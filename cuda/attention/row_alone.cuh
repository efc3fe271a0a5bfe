// One row of masked attention with plain arithmetic, for rows that came out with an infinity or a
// NaN. Where a step holds keys that some row does not see, the tensor cores spread one in V to that
// row, since they multiply it by a masked probability and 0 * NaN is NaN; here a row reads its
// visible keys only.
#pragma once

#include "core/attention.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/numeric/tanh.cuh"

namespace flashmoe {

// Below every offset of a row's scores, yet finite: masked scores less it are -inf, not NaN.
inline constexpr float kNoOffset = -1.0e38f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// The row's tensors: one query row, and its keys and values, of which it sees those from first_key
// to before `keys`.
struct LoneRow {
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

// For a whole warp. Calls store(column, element) for every column of the output, and returns the row's
// log-sum-exp in base 2, of scores, or their capped ones, times scale_log2.
template <class Element, int kDimV, class Store>
__device__ __forceinline__ float compute_row_alone(const LoneRow& row, float scale_log2,
                                                   Store store) {
  using Numeric = numeric::ElementTraits<Element>;
  constexpr uint32_t kFullWarp = 0xffffffffu;
  constexpr int kLanes = 32;
  constexpr int kColumnsPerLane = (kDimV + kLanes - 1) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float acc[kColumnsPerLane] = {};
  float sum = 0.0f;
  float offset = kNoOffset;
  for (int first = row.first_key; first < row.keys; first += kLanes) {
    const int key = first + lane;
    float score = -INFINITY;
    if (key < row.keys) {
      score = 0.0f;
      for (int d = 0; d < row.dim; ++d) {
        score += Numeric::to_float(row.q[d]) * Numeric::to_float(row.k[key * row.k_stride + d]);
      }
      if (row.cap_ratio != 0.0f) score = numeric::tanh(score * row.cap_ratio);
      score *= scale_log2;
    }
    float top = score;
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, mask));
    }
    const float raised = fmaxf(top, offset);
    const float factor = numeric::exp2_approx(offset - raised);
    offset = raised;
    const float p = numeric::exp2_approx(score - offset);
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
  return row.keys > row.first_key ? offset + log2f(sum) : -INFINITY;
}

}  // namespace flashmoe
