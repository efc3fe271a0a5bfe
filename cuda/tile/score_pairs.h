// What a call says of each pair of a query and a key: a bias of its logit, and a mask. Kernels
// without them do not know of these: an instance of its own has them behind its parameters.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"

#ifdef __CUDACC__
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/score_options.h"
#endif

namespace flashmoe {

// [batch, heads_q, seq_q, seq_k]; data is nullptr: absent.
struct PairNumbers {
  const void* data;
  int64_t batch_stride;  // elements
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;
  // Numbers of a row lie side by side, and rows begin at multiples of so many bytes, 16 at most;
  // 0 where they do not.
  int32_t alignment;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t offset_of(int batch, int head, int query) const {
    return batch * batch_stride + head * head_stride + query * query_stride;
  }
#endif
};

// Scores become logits, of which ScoreOptions::scale_log2 is then.
struct ScorePairs {
  PairNumbers bias;
  PairNumbers mask;  // bytes, 0 where a key is hidden
  int32_t bias_is_fp32;
  float factor;  // of scores; with a softcap of their tanh

#ifdef __CUDACC__
  // A bias hides a key, too.
  static constexpr float kHidden = -INFINITY;
#endif
};

inline ScorePairs score_pairs(const AttentionProblem& p) {
  const auto numbers = [](const PairsView& view, int64_t bytes) {
    const auto reach =
        reinterpret_cast<uintptr_t>(view.data) |
        static_cast<uintptr_t>(
            (view.batch_stride | view.head_stride | view.query_stride | 16 / bytes) * bytes);
    const auto alignment = static_cast<int32_t>(reach & (~reach + 1));
    return PairNumbers{view.data,         view.batch_stride, view.head_stride,
                       view.query_stride, view.key_stride,   view.key_stride == 1 ? alignment : 0};
  };
  const bool fp32 = p.bias.dtype == Dtype::kFloat32;
  return {numbers(p.bias, fp32 ? 4 : 2), numbers(p.mask, 1), fp32 ? 1 : 0,
          p.softcap != 0.0f ? p.softcap : p.scale};
}

#ifdef __CUDACC__

// The numbers of one query, of keys that there are.
template <class Element>
struct PairRow {
  const ScorePairs& pairs;
  const char* bias;  // of key 0, or nullptr
  const char* mask;

  __device__ __forceinline__ PairRow(const ScorePairs& pairs, int batch, int head, int query)
      : pairs(pairs),
        bias(static_cast<const char*>(pairs.bias.data)),
        mask(static_cast<const char*>(pairs.mask.data)) {
    const int bytes = pairs.bias_is_fp32 != 0 ? 4 : 2;
    if (bias != nullptr) bias += pairs.bias.offset_of(batch, head, query) * bytes;
    if (mask != nullptr) mask += pairs.mask.offset_of(batch, head, query);
  }

  // What is added to the logit of a key, or kHidden.
  __device__ __forceinline__ float bias_of(int key) const {
    if (mask != nullptr && mask[key * pairs.mask.key_stride] == 0) return ScorePairs::kHidden;
    if (bias == nullptr) return 0.0f;
    const int64_t at = key * pairs.bias.key_stride;
    if (pairs.bias_is_fp32 != 0) return reinterpret_cast<const float*>(bias)[at];
    return numeric::ElementTraits<Element>::to_float(reinterpret_cast<const uint16_t*>(bias)[at]);
  }
};

// Of a hidden key whatever its score.
__device__ __forceinline__ float biased_logit(float score, float factor, float bias) {
  return bias == ScorePairs::kHidden ? bias : fmaf(score, factor, bias);
}

#endif

}  // namespace flashmoe
