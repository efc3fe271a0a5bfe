// A layer's `down` begins while its `up` still runs: how far that is.
#pragma once

#include <climits>

#include "cuda/moe/sm90/params.h"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

// `up` of a layer, one thread of each block, before it lets `down` begin: says that no tile is
// stored. Every block of `up` has done so when there is a block of `down`, which so never sees what
// was there before; nobody else looks.
__device__ __forceinline__ void begin_progress(const Params& params) {
  uint32_t* const words = params.progress + blockIdx.x * kConsumers;
  for (int group = 0; group < kConsumers; ++group) words[group] = 0;
  if (blockIdx.x == 0) params.progress[gridDim.x * kConsumers] = 0;
  __threadfence();
}

// How much of `up` a warp of `down` knows to be over. Items of `up` go to its clusters in turn.
struct Progress {
  int known = 0;  // items from the first on that are stored

  // Waits until so many are stored and the copy engine may load what they gave; a whole warp. This
  // ends: when there is a block of `down`, all of `up` have begun, each has its multiprocessor
  // until it ends, and they wait for nothing that `down` does. Items here are those that they take:
  // both read the same offsets.
  __device__ __forceinline__ void wait_for(const Params& params, int needed) {
    if (needed <= known) return;
    do {
      unsigned first = INT_MAX;  // that is not stored
      for (int cluster = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
           cluster < params.up_clusters; cluster += kThreadsPerWarp) {
        static_assert(kCluster * kConsumers == 4);
        const uint4 tiles = ptx::load_relaxed(params.progress + cluster * kCluster * kConsumers);
        const unsigned stored = min(min(tiles.x, tiles.y), min(tiles.z, tiles.w));
        first = min(first, stored * params.up_clusters + cluster);
      }
      known = static_cast<int>(__reduce_min_sync(kFullWarp, first));
    } while (known < needed);
    __threadfence();
    __syncwarp();
    ptx::fence_proxy_async();
  }
};

}  // namespace flashmoe::moe::sm90
