// Arguments of the routing kernels, as the device sees them.
#pragma once

#include <cstdint>

#include "cuda/tile/extents.h"

namespace flashmoe::moe_route {

inline constexpr int kMaxFewPairs = 64;  // upper bound on pairs that are compared with each other
inline constexpr int kMaxCluster = 16;   // upper bound on blocks that route together in one launch
inline constexpr int kPlaceThreads = 1024;   // per block of the second launch
inline constexpr int kHistogramColumns = 4;  // `histograms` rows are padded to a multiple of this

// Division of numbers up to 1024 by a smaller one: a product with the reciprocal, rounded up to
// 2^-20. It is exact for these numbers.
struct SmallDivisor {
  uint32_t multiplier;

  static SmallDivisor of(int value) {
    return {((1u << 20) + static_cast<uint32_t>(value) - 1) / static_cast<uint32_t>(value)};
  }

#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int number) const {
    return static_cast<int>(static_cast<uint32_t>(number) * multiplier >> 20);
  }
#endif
};

// The quantities that a block's shared memory depends on.
struct SharedShape {
  int experts;
  int top_k;
  int num_groups;
  int warps;
  int cluster;
  int block_tokens;
  bool keeps_list;
};

struct Params {
  const void* logits;  // [tokens, experts]; strides are in elements
  int64_t logits_stride;
  const float* bias;  // [experts] or nullptr
  const void* given_ids;
  int64_t given_ids_stride;
  const void* given_weights;  // or nullptr
  int64_t given_weights_stride;
  const int32_t* expert_map;  // or nullptr
  int64_t given_limit;  // ids from here on are no experts: length of the map, or number of experts

  int32_t* ids;
  float* weights;
  int32_t* offsets;
  int32_t* pairs;
  int32_t* slots;
  float* lse;           // or nullptr
  int32_t* histograms;  // [blocks, histogram_stride]: pairs per block and expert; for two launches

  int32_t tokens;
  int32_t experts;
  int32_t top_k;
  int32_t dtype;     // a Dtype: of the logits or the given weights
  int32_t wide_ids;  // given ids are int64
  int32_t vectors;   // logits can be loaded in whole vectors
  int32_t scoring;   // flashmoe_moe_scoring
  int32_t renormalize;
  float scale;

  int32_t num_groups;  // 1: no groups
  int32_t top_groups;
  int32_t group_experts;     // per group
  int32_t group_lanes_log2;  // log2 of the lanes that look at a group together
  int32_t group_steps;       // experts of a group per such lane
  SmallDivisor into_groups;  // divides by group_experts

  int32_t block_tokens;    // per block
  int32_t warp_tokens;     // per warp
  int32_t warp_step;       // tokens that a warp takes at a time, for given ids
  int32_t used_warps;      // warps of a block that have tokens
  int32_t few;             // so few pairs that each is compared with all
  int32_t thread_experts;  // experts per thread in the sums of counts of a single launch
  int32_t cluster;         // blocks that route together; 1 without clusters
  int32_t histogram_stride;
  int32_t scratch_words;  // per warp
  int32_t keeps_list;     // a block's choices stay in its shared memory
};

}  // namespace flashmoe::moe_route
