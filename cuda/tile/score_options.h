// What a call makes of its scores Q K^T between the products and the softmax: the scale, the
// softcap, and which keys a query sees. Every attention kernel has them from here: an option is
// added to this struct, to score_options of cuda/attention/launch.h, which fills it, and to what
// the kernels call.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include <type_traits>

#include "cuda/numeric/tanh.cuh"
#endif

namespace flashmoe {

// Keys from `first` to the one before `end`, none where end <= first.
struct KeyRange {
  int first;
  int end;
};

// By which function a softcap is computed: one that is exact, or one with fewer registers.
enum class Softcap { kExact, kBrief };

struct ScoreOptions {
  // Query i sees the keys from i + left_offset to i + right_offset, as far as there are such keys.
  // An absent bound lies beyond all of them; row + offset + 1 fits.
  int32_t left_offset;
  int32_t right_offset;
  int32_t masked;         // some row does not see every key
  int32_t bounded_right;  // right_offset is a bound
  float scale_log2;       // scale * log2(e); with a softcap softcap * log2(e)
  float cap_ratio;        // scale / softcap; 0 without

#ifdef __CUDACC__
  // The keys that a query sees of so many. Neither end decreases with the query.
  __device__ __forceinline__ int first_key(int query) const { return max(0, query + left_offset); }
  __device__ __forceinline__ int end_key(int query, int seq_k) const {
    return max(0, min(seq_k, query + right_offset + 1));
  }
  __device__ __forceinline__ KeyRange keys(int query, int seq_k) const {
    return {max(0, query + left_offset), min(seq_k, query + right_offset + 1)};
  }
  // The queries of so many that see a key; as for keys, none where the end is not behind the first.
  __device__ __forceinline__ int first_query(int key) const { return max(0, key - right_offset); }
  __device__ __forceinline__ int end_query(int key, int seq_q) const {
    return max(0, min(seq_q, key - left_offset + 1));
  }
  __device__ __forceinline__ bool sees_keys(int query, int seq_k) const {
    return first_key(query) < end_key(query, seq_k);
  }

  // With a softcap scores, or an array of them, become tanh(cap_ratio * scores), which scale_log2
  // is then of.
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

}  // namespace flashmoe
