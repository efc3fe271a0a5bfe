// Indices of a thread in its block, warp and warpgroup.
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
// Whole warps call it: it shuffles, so that the compiler knows that the result is uniform.
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(__shfl_sync(kFullWarp, threadIdx.x / kThreadsPerWarp, 0));
}

// The same indices, read anew at each use. Kept across a main loop, they and values derived from
// them would take registers that the accumulators need. A kernel's namespace imports these by
// `using`.
namespace reread {

__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int lane_index() { return thread_index() % kThreadsPerWarp; }
// Read from another register: ptxas then keeps values derived from it apart from values derived
// from the others.
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

// Keeps a value in its register. Without it, ptxas recomputes addresses from the thread index at
// every step.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace flashmoe
