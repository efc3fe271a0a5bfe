// A layer's `down` begins while its `up` still runs: the progress of `up`.
#pragma once

#include <climits>

#include "cuda/moe/sm90/params.h"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

// In `up` of a layer, one thread of each block calls it before it lets `down` begin: clears the
// numbers of stored tiles. Every block of `up` has done so before a block of `down` exists, so
// `down` never sees old values, and nobody else looks.
__device__ __forceinline__ void begin_progress(const Params& params) {
  uint32_t* const words = params.progress + blockIdx.x * kConsumers;
  for (int group = 0; group < kConsumers; ++group) words[group] = 0;
  if (blockIdx.x == 0) params.progress[gridDim.x * kConsumers] = 0;
  __threadfence();
}

// The part of `up` that a warp of `down` knows to be done. Items of `up` go to its clusters in
// turn.
struct Progress {
  int known = 0;  // items from the first one on that are stored

  // Waits until `needed` items are stored and the copy engine may load their results. A whole warp
  // calls it. The wait ends: when a block of `down` exists, all blocks of `up` have begun, each
  // keeps its multiprocessor until it ends, and none waits for `down`. Both kernels read the same
  // offsets, so they count the same items.
  __device__ __forceinline__ void wait_for(const Params& params, int needed) {
    if (needed <= known) return;
    do {
      unsigned first = INT_MAX;  // the first item that is not stored
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
