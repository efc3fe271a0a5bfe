// Computes one row of attention by plain arithmetic, for rows that the tensor cores cannot serve:
//
// - Rows of a mask that came out with an infinity or a NaN. If a step holds keys that some row does
//   not see, the tensor cores spread a non-finite value of V to that row: they multiply it by a
//   masked probability, and 0 * NaN is NaN. Here a row reads its visible keys only.
// - Rows with logits beyond kMostRowMax. Here scores are subtracted from each other before they are
//   scaled, so that no rounding comes between.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/attention/tensors.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/score_options.h"
#include "cuda/tile/score_pairs.h"
#include "cuda/tile/softmax.cuh"

namespace flashmoe {

// A query row of one head, and the keys that it sees.
struct MaskedRow {
  int batch;
  int head;
  int head_kv;
  int query;
  KeyRange keys;
};

__device__ __forceinline__ int64_t row_offset(const RowStrides& strides, const MaskedRow& row) {
  return row.batch * strides.batch + row.head * strides.head + row.query * strides.seq;
}

// Keys whose rows are evenly spaced in the row's batch. Other key types give the address of a key's
// rows by k(key) and v(key): nullptr for a hidden key. If keys have scales, they give them by
// k_scale(key) and v_scale(key).
struct EvenKeys {};

template <class Keys>
__device__ __forceinline__ auto k_scale_of(const Keys& keys, int key, int)
    -> decltype(keys.k_scale(key)) {
  return keys.k_scale(key);
}
template <class Keys>
__device__ __forceinline__ float k_scale_of(const Keys&, int, long) {
  return 1.0f;
}
template <class Keys>
__device__ __forceinline__ auto v_scale_of(const Keys& keys, int key, int)
    -> decltype(keys.v_scale(key)) {
  return keys.v_scale(key);
}
template <class Keys>
__device__ __forceinline__ float v_scale_of(const Keys&, int, long) {
  return 1.0f;
}

// Whether a key type also has a bias: logit(score, key) of a key that is not hidden.
template <class Keys, class = void>
inline constexpr bool kHasBias = false;
template <class Keys>
inline constexpr bool kHasBias<Keys, std::void_t<decltype(&Keys::logit)>> = true;

// Keys of a call with a bias or a mask.
template <class Element>
struct BiasedKeys {
  const uint16_t* k_rows;  // row of key 0
  const uint16_t* v_rows;
  int64_t k_stride;
  int64_t v_stride;
  PairRow<Element> row;

  __device__ __forceinline__ BiasedKeys(const AttentionTensors& tensors, const ScorePairs& pairs,
                                        const MaskedRow& row)
      : k_rows(tensors.k + row.batch * tensors.k_strides.batch +
               row.head_kv * tensors.k_strides.head),
        v_rows(tensors.v + row.batch * tensors.v_strides.batch +
               row.head_kv * tensors.v_strides.head),
        k_stride(tensors.k_strides.seq),
        v_stride(tensors.v_strides.seq),
        row(pairs, row.batch, row.head, row.query) {}

  __device__ __forceinline__ bool is_hidden(int key) const {
    return row.bias_of(key) == ScorePairs::kHidden;
  }
  __device__ __forceinline__ const uint16_t* k(int key) const {
    return is_hidden(key) ? nullptr : k_rows + key * k_stride;
  }
  __device__ __forceinline__ const uint16_t* v(int key) const {
    return is_hidden(key) ? nullptr : v_rows + key * v_stride;
  }
  __device__ __forceinline__ float logit(float score, int key) const {
    return biased_logit(score, row.pairs.factor, row.bias_of(key));
  }
};

// Computes a row and writes its output and log-sum-exp. A whole warp calls it. `writes(column)`
// returns whether to write a column; column 0 decides about the log-sum-exp.
template <class Element, int kDimV, class Writes, class Keys = EvenKeys>
__device__ __forceinline__ void masked_row_fallback(const AttentionTensors& tensors,
                                                    const ScoreOptions& options,
                                                    const MaskedRow& row, const Writes& writes,
                                                    const Keys& keys = {}) {
  constexpr bool kEven = std::is_same_v<Keys, EvenKeys>;
  using Numeric = numeric::ElementTraits<Element>;
  constexpr int kLanes = kThreadsPerWarp;
  constexpr int kColumnsPerLane = ceil_div(kDimV, kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const uint16_t* const q = tensors.q + row_offset(tensors.q_strides, row);
  const uint16_t* const k =
      tensors.k + row.batch * tensors.k_strides.batch + row.head_kv * tensors.k_strides.head;
  const uint16_t* const v =
      tensors.v + row.batch * tensors.v_strides.batch + row.head_kv * tensors.v_strides.head;
  uint16_t* const out = tensors.out + row_offset(tensors.out_strides, row);
  const int64_t k_stride = tensors.k_strides.seq;
  const int64_t v_stride = tensors.v_strides.seq;
  const float scale_log2 = options.scale_log2;
  const int dim = tensors.dim;
  const int dim_v = tensors.dim_v;
  const int end_key = row.keys.end;
  float acc[kColumnsPerLane] = {};
  float sum = 0.0f;
  float top = -FLT_MAX;
  bool any_seen = false;  // whether any key is visible, where some may be hidden
  // 2^((score - other) * scale_log2). It halves both scores because the difference of two finite
  // scores may overflow.
  const auto power = [&](float score, float other) {
    const float half = (0.5f * score - 0.5f * other) * scale_log2;
    return numeric::exp2_approx(half + half);
  };
  for (int first = row.keys.first; first < end_key; first += kLanes) {
    const int key = first + lane;
    float score = -INFINITY;
    if constexpr (kEven) {
      if (key < end_key) {
        score = 0.0f;
        for (int d = 0; d < dim; ++d) {
          score += Numeric::to_float(q[d]) * Numeric::to_float(k[key * k_stride + d]);
        }
        if (options.capped()) options.cap(score);
      }
    } else {
      const auto k_row = key < end_key ? keys.k(key) : nullptr;
      if (k_row != nullptr) {
        score = 0.0f;
        for (int d = 0; d < dim; ++d) {
          score += Numeric::to_float(q[d]) * Numeric::to_float(k_row[d]);
        }
        score *= k_scale_of(keys, key, 0);
        if (options.capped()) options.cap(score);
        if constexpr (kHasBias<Keys>) score = keys.logit(score, key);
      }
      any_seen = __any_sync(kFullWarp, k_row != nullptr) || any_seen;
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
    for (int i = 0; i < kLanes && first + i < end_key; ++i) {
      const float p_i = __shfl_sync(kFullWarp, p, i);
      if constexpr (kEven) {
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) {
          const int column = c * kLanes + lane;
          if (column < dim_v) {
            acc[c] += p_i * Numeric::to_float(v[(first + i) * v_stride + column]);
          }
        }
      } else {
        const auto v_row = keys.v(first + i);
        if (v_row == nullptr) continue;
        const float weight = p_i * v_scale_of(keys, first + i, 0);
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) {
          const int column = c * kLanes + lane;
          if (column < dim_v) acc[c] += weight * Numeric::to_float(v_row[column]);
        }
      }
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
  const bool sees_keys = kEven ? row.keys.first < end_key : any_seen;
  const RowEnd end = end_row_of_scores<Element>(options, row.head, sees_keys, top, sum);
#pragma unroll
  for (int c = 0; c < kColumnsPerLane; ++c) {
    const int column = c * kLanes + lane;
    if (column < dim_v) {
      const float value = sees_keys ? acc[c] * end.factor : 0.0f;
      if (writes(column)) out[column] = static_cast<uint16_t>(Numeric::pack(value, 0.0f));
    }
  }
  if (tensors.lse == nullptr || lane != 0 || !writes(0)) return;
  tensors.lse[row_offset(tensors.lse_strides, row)] = end.lse;
}

// The same if the warp writes the whole row.
template <class Element, int kDimV>
__device__ __forceinline__ void masked_row_fallback(const AttentionTensors& tensors,
                                                    const ScoreOptions& options,
                                                    const MaskedRow& row) {
  masked_row_fallback<Element, kDimV>(tensors, options, row, [](int) { return true; });
}

}  // namespace flashmoe
