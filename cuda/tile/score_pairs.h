// Options per pair of a query and a key: a bias of its logit, and a mask. Kernels without them do
// not have them in their parameters: separate instances have them at the end.
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
  // The numbers of a row are contiguous, and rows begin at multiples of this many bytes, at most
  // 16. 0 if not.
  int32_t alignment;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t offset_of(int batch, int head, int query) const {
    return batch * batch_stride + head * head_stride + query * query_stride;
  }
#endif
};

// Turns scores into logits. ScoreOptions::scale_log2 applies to these.
struct ScorePairs {
  PairNumbers bias;
  PairNumbers mask;  // bytes, 0 where a key is hidden
  int32_t bias_is_fp32;
  float factor;  // factor of scores, or with a softcap of their tanh

#ifdef __CUDACC__
  // A bias can hide a key, too.
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

// The numbers of one query. Callers ask for existing keys only.
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

  // The bias of a key's logit, or kHidden.
  __device__ __forceinline__ float bias_of(int key) const {
    if (mask != nullptr && mask[key * pairs.mask.key_stride] == 0) return ScorePairs::kHidden;
    if (bias == nullptr) return 0.0f;
    const int64_t at = key * pairs.bias.key_stride;
    if (pairs.bias_is_fp32 != 0) return reinterpret_cast<const float*>(bias)[at];
    return numeric::ElementTraits<Element>::to_float(reinterpret_cast<const uint16_t*>(bias)[at]);
  }
};

// A hidden key stays hidden whatever its score.
__device__ __forceinline__ float biased_logit(float score, float factor, float bias) {
  return bias == ScorePairs::kHidden ? bias : fmaf(score, factor, bias);
}

#endif

}  // namespace flashmoe
