// The warp that looks for what is not finite in K and V, in calls with bounds: behind.cuh.
#pragma once

#include "cuda/attention/sm90_backward/backward.cuh"

namespace flashmoe::sm90_backward {

// Reads what the items of the block have in shared memory, beside the consumers, and leaves a word
// for each.
template <class Traits>
struct Watcher {
  const Params& params;
  const Barriers<Traits> barriers;
  const uint32_t shared;
  const Item* const shared_items;

  template <int kBytes>
  __device__ __forceinline__ uint32_t gather(uint32_t gathered, uint32_t from) const {
    constexpr int kChunkBytes = 16;
    constexpr int kAtOnce = 2;  // there are few registers
    static_assert(kBytes % (kAtOnce * kThreadsPerWarp * kChunkBytes) == 0);
    const uint32_t own = from + lane_index() * kChunkBytes;
#pragma unroll 1
    for (int at = 0; at < kBytes; at += kAtOnce * kThreadsPerWarp * kChunkBytes) {
      uint4 chunks[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        chunks[i] = ptx::load_shared_uint4(own + at + i * kThreadsPerWarp * kChunkBytes);
      }
#pragma unroll
      for (const uint4& chunk : chunks) {
        gathered = numeric::gather_nonfinite<typename Traits::Element>(gathered, chunk.x);
        gathered = numeric::gather_nonfinite<typename Traits::Element>(gathered, chunk.y);
        gathered = numeric::gather_nonfinite<typename Traits::Element>(gathered, chunk.z);
        gathered = numeric::gather_nonfinite<typename Traits::Element>(gathered, chunk.w);
      }
    }
    return gathered;
  }

  __device__ __forceinline__ void run() const {
    for (uint32_t items = 0;; ++items) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      const SharedItem& item = shared_items[items % kItemsHeld];
      if (item.tile == kNoItem) break;
      ptx::mbarrier_wait(barriers.v_full(), items & 1);
      uint32_t gathered = 0;
      if (item.begin < item.end) {  // otherwise nothing was loaded
        gathered = gather<Traits::kKBytes>(gathered, shared + Traits::kKOffset);
        gathered = gather<Traits::kVBytes>(gathered, shared + Traits::kVOffset);
      }
      const bool any =
          __any_sync(kFullWarp, numeric::any_nonfinite<typename Traits::Element>(gathered));
      const int tile = (item.batch * params.heads_kv + item.head_kv) * params.tiles_k + item.tile;
      if (lane_index() == 0) {
        params.nonfinite_keys[int64_t{tile} * Traits::kCluster + block_rank<Traits>()] = any;
        ptx::mbarrier_arrive(barriers.k_empty());
        ptx::mbarrier_arrive(barriers.v_empty());
      }
      __syncwarp();
    }
  }
};

}  // namespace flashmoe::sm90_backward
