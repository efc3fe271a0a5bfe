// How the kernel begins beside its prologue. One warp of each block reads how many chunks of rows
// the prologue's workers have done, until all are; the producer takes an item when the rows of its
// heads are ready. Nothing else reads what the prologue writes before K of the item has come.
//
// The prologue sets the ticket, split_turns and its counts of chunks to 0 and lets this kernel
// begin behind that: they are read by atomics and past the L1 alone. All of its blocks have begun
// by then, so that whoever waits here waits for blocks that run.
#pragma once

#include "cuda/attention/backward/prologue.cuh"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/relaxed.cuh"
#include "cuda/ptx/shared_progress.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::chunks_of;

// Worker w of n has chunks w, w + n and so on: with d of them done its next one is w + d n. For a
// whole warp, which has a fence behind it before it counts on what the workers wrote.
__device__ __forceinline__ uint32_t first_not_done(const Params& params) {
  static_assert(attention_backward::kMostWatchedWorkers <= 4 * kThreadsPerWarp,
                "four words for each lane");
  const auto workers = static_cast<uint32_t>(params.prologue_workers);
  const uint32_t first = 4 * reread::lane_index();
  uint32_t least = ~0u;
  if (first < workers) {
    const uint4 words = ptx::load_relaxed(params.chunks_done + first);
    least = min(min(words.x * workers + first, words.y * workers + first + 1),
                min(words.z * workers + first + 2, words.w * workers + first + 3));
  }
  return __reduce_min_sync(kFullWarp, least);
}

// A warp for each block. It ends with the prologue, which is what the kernels behind this one count
// on.
template <class Traits>
__device__ __forceinline__ void watch_prologue(const Params& params, uint32_t chunks_ready) {
  const uint32_t chunks = chunks_of<Traits>(params, params.batch * params.heads_q);
  uint32_t ready = 0;
  while (ready < chunks) {
    const uint32_t now = first_not_done(params);
    if (now == ready) continue;
    ready = now;
    ptx::fence_gpu();
    __syncwarp();
    if (reread::lane_index() == 0) ptx::store_shared_release(chunks_ready, ready);
  }
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
}

// Waits for the rows of all heads up to those of an item.
template <class Traits>
__device__ __forceinline__ void wait_for_rows(const Params& params, const Item& item,
                                              uint32_t chunks_ready) {
  const int heads = item.batch * params.heads_q + (item.head_kv + 1) * params.heads_per_kv;
  const uint32_t needed = chunks_of<Traits>(params, heads);
  while (ptx::load_shared_acquire(chunks_ready) < needed) {
  }
  ptx::fence_proxy_async();
}

}  // namespace flashmoe::sm90_backward
