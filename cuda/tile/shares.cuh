// Equal shares of work that is told by lengths on the device: sequences have so many units each,
// one behind the other, and share b of G has the units from b W / G on, of W. Each block works out
// from the lengths where its share begins, by a sum over all sequences.
#pragma once

#include <cstdint>

#include "cuda/tile/thread.cuh"

namespace flashmoe {

// The share that has a unit: the last that begins no later.
__device__ __forceinline__ int owner_of(int shares, int64_t total, int64_t unit) {
  return static_cast<int>(((unit + 1) * shares - 1) / total);
}

// Finds the sequence s in which share `index` begins. One thread calls found(s, before, total,
// shares): units before s, those of all sequences, and the shares that there are, at most
// `most_shares`, which are returned. Thread 0 calls reset() first. For all threads; ends with
// a barrier. Thread t describes the sequences from t n on, n of them, the last of which is `known`.
template <int kThreads, class Described, class Describe, class UnitsOf, class Reset, class Found>
__device__ __forceinline__ int find_share(int count, int index, int most_shares,
                                          int64_t (&warp_units)[kThreads / kThreadsPerWarp],
                                          Described& known, const Describe& describe,
                                          const UnitsOf& units_of, const Reset& reset,
                                          const Found& found) {
  using reread::lane_index;
  const int thread = reread::thread_index();
  const int warp = reread::warp_index();
  const int each = (count + kThreads - 1) / kThreads;
  const int first = thread * each;
  const int end = min(first + each, count);
  int64_t mine = 0;
  for (int s = first; s < end; ++s) {
    known = describe(s);
    mine += units_of(known);
  }
  int64_t upto = mine;  // this thread, in its warp
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane_index() >= step) upto += before;
  }
  if (lane_index() == kThreadsPerWarp - 1) warp_units[warp] = upto;
  if (thread == 0) reset();
  __syncthreads();
  int64_t total = 0;
  int64_t before = upto - mine;
#pragma unroll
  for (int w = 0; w < kThreads / kThreadsPerWarp; ++w) {
    const int64_t units = warp_units[w];
    if (w < warp) before += units;
    total += units;
  }
  const int shares = static_cast<int>(min(total, int64_t{most_shares}));
  if (index < shares) {
    const int64_t begin = total * index / shares;
    if (before <= begin && begin < before + mine) {
      int s = first;
      for (; s + 1 < end; ++s) {
        const int64_t units = units_of(describe(s));
        if (begin < before + units) break;
        before += units;
      }
      found(s, before, total, shares);
    }
  }
  __syncthreads();
  return shares;
}

}  // namespace flashmoe
