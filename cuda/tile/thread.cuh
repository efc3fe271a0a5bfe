// Which thread of its block, warp and warpgroup a thread is.
#pragma once

#include "cuda/tile/extents.h"

namespace flashmoe {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int thread_count() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x % kThreadsPerWarp);
}
__device__ __forceinline__ int warp_count() {
  return static_cast<int>(blockDim.x / kThreadsPerWarp);
}
// For whole warps: it shuffles, so that the compiler knows the result to be uniform.
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(__shfl_sync(kFullWarp, threadIdx.x / kThreadsPerWarp, 0));
}

// The same, read anew where they are used: kept across a main loop they, and what follows from
// them, would cost registers that the accumulators need. A kernel's namespace takes these by
// `using`.
namespace reread {

__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int lane_index() { return thread_index() % kThreadsPerWarp; }
// From another register: what follows from it, ptxas keeps apart from what follows from the others.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullWarp, thread_index() / kThreadsPerWarp, 0);
}
__device__ __forceinline__ int warp_of_group() { return thread_index() / kThreadsPerWarp % 4; }

}  // namespace reread

// Keeps a value in its register: without this, ptxas computes addresses again at every step, from
// the thread index on.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace flashmoe
