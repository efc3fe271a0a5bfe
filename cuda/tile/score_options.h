// The options of a call that change its scores Q K^T between the products and the end of the
// softmax: scale, softcap, visible keys, and sinks. Every attention kernel takes them from here. A
// new option goes into this struct, into score_options, which fills it, and into the functions that
// kernels call, here and in cuda/tile/softmax.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/ops/attention/problem.h"

#ifdef __CUDACC__
#include <type_traits>

#include "cuda/numeric/tanh.cuh"
#endif

namespace flashmoe {

// Keys from `first` to before `end`. Empty if end <= first.
struct KeyRange {
  int first;
  int end;
};

// How a softcap is computed: exactly, or with fewer registers.
enum class Softcap { kExact, kBrief };

struct ScoreOptions {
  // Query i sees the existing keys from i + left_offset to i + right_offset. An absent bound lies
  // beyond all keys; row + offset + 1 fits in int32. In ragged, padded and paged batches each
  // sequence's diagonal is added to i (cuda/tile/sequence_tables.h), and the three numbers after
  // the offsets say what is possible.
  int32_t left_offset;
  int32_t right_offset;
  int32_t masked;         // some row does not see every key
  int32_t blind_rows;     // some row sees no key
  int32_t bounded_right;  // right_offset is a bound
  float scale_log2;       // scale * log2(e); with a softcap, softcap * log2(e)
  float cap_ratio;        // scale / softcap; 0 without a softcap
  int32_t sinks_are_fp32;
  // [heads_q], fp32 or the elements' type, in natural units; nullptr: no sinks.
  const void* sinks;
  int64_t sink_stride;  // elements

#ifdef __CUDACC__
  // The keys, of seq_k, that a query sees. Neither end decreases with the query.
  __device__ __forceinline__ int first_key(int query) const { return max(0, query + left_offset); }
  __device__ __forceinline__ int end_key(int query, int seq_k) const {
    return max(0, min(seq_k, query + right_offset + 1));
  }
  __device__ __forceinline__ KeyRange keys(int query, int seq_k) const {
    return {max(0, query + left_offset), min(seq_k, query + right_offset + 1)};
  }
  // The queries, of seq_q, that see a key. Empty if end <= first, as for keys.
  __device__ __forceinline__ int first_query(int key) const { return max(0, key - right_offset); }
  __device__ __forceinline__ int end_query(int key, int seq_q) const {
    return max(0, min(seq_q, key - left_offset + 1));
  }
  __device__ __forceinline__ bool sees_keys(int query, int seq_k) const {
    return first_key(query) < end_key(query, seq_k);
  }

  // With a softcap, scores, or an array of them, become tanh(cap_ratio * scores). scale_log2
  // applies to that.
  __device__ __forceinline__ bool capped() const { return cap_ratio != 0.0f; }
  template <Softcap kSoftcap = Softcap::kExact, class Scores>
  __device__ __forceinline__ void cap(Scores& scores) const {
    if constexpr (std::is_array_v<Scores>) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(std::extent_v<Scores>); ++i) cap<kSoftcap>(scores[i]);
    } else if constexpr (kSoftcap == Softcap::kExact) {
      scores = numeric::tanh(scores * cap_ratio);
    } else {
      scores = numeric::tanh_brief(scores * cap_ratio);
    }
  }
#endif
};

// Bounds beyond all keys, for a side on which every row sees every key.
inline constexpr int32_t kNoLeftOffset = -(1 << 30);
inline constexpr int32_t kNoRightOffset = (1 << 30) - 1;

// Offsets from a sequence's diagonal, which does not follow from the call's lengths.
inline void set_offsets_of_sequences(const AttentionMask& mask, ScoreOptions* score) {
  const bool left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right =
      mask.causal != FLASHMOE_CAUSAL_NONE || (mask.window & FLASHMOE_WINDOW_RIGHT) != 0;
  // Windows that reach beyond all keys hide none.
  const int64_t window_left = std::min<int64_t>(mask.window_left, -int64_t{kNoLeftOffset});
  const int64_t window_right = std::min<int64_t>(mask.window_right, kNoRightOffset);
  score->left_offset = left ? static_cast<int32_t>(-window_left) : kNoLeftOffset;
  score->right_offset = right ? static_cast<int32_t>(window_right) : kNoRightOffset;
  score->masked = left || right ? 1 : 0;
  score->bounded_right = right ? 1 : 0;
  score->blind_rows = 1;
}

// The scale is finite, and may be as large as fp32 allows.
inline ScoreOptions score_options(const AttentionProblem& p) {
  constexpr double kLog2E = 1.4426950408889634;
  const double factor = p.softcap != 0.0f ? p.softcap : p.scale;
  ScoreOptions score;
  score.left_offset = p.bounded_left ? static_cast<int32_t>(p.left_offset) : kNoLeftOffset;
  score.right_offset = p.bounded_right ? static_cast<int32_t>(p.right_offset) : kNoRightOffset;
  score.masked = p.bounded_left || p.bounded_right ? 1 : 0;
  score.bounded_right = p.bounded_right ? 1 : 0;
  score.blind_rows = p.seq_k == 0 || (p.bounded_right && p.right_offset < 0) ||
                             (p.bounded_left && p.left_offset + p.seq_q > p.seq_k)
                         ? 1
                         : 0;
  score.scale_log2 =
      static_cast<float>(std::min(factor * kLog2E, double{std::numeric_limits<float>::max()}));
  if (p.sequences.given) set_offsets_of_sequences(p.sequences.mask, &score);
  if (p.bias.data != nullptr || p.mask.data != nullptr) {
    // Kernels with a bias or a mask turn scores into logits (score_pairs.h), and any row may see no
    // key.
    score.masked = 1;
    score.blind_rows = 1;
    score.scale_log2 = static_cast<float>(kLog2E);
  }
  score.cap_ratio = p.cap_ratio;
  score.sinks = p.sinks.data;
  score.sink_stride = p.sinks.stride;
  score.sinks_are_fp32 = p.sinks.dtype == Dtype::kFloat32 ? 1 : 0;
  return score;
}

}  // namespace flashmoe
