// Named barriers 0 to 15 of a block: some warps of it meet. `threads`, a multiple of 32, counts those
// that wait and those that only arrive. Barrier 0 is __syncthreads'.
#pragma once

namespace flashmoe::ptx {

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace flashmoe::ptx
