// Named barriers 0 to 15 of a block, at which some of its warps meet. `threads`, a multiple of 32,
// counts those that wait and those that only arrive. Barrier 0 belongs to __syncthreads.
#pragma once

namespace flashmoe::ptx {

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same for warps that wait at different instructions: all warps at a bar.sync must wait at the
// same instruction.
__device__ __forceinline__ void named_barrier_sync_apart(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// named_barrier_sync that also returns whether all threads pass true.
__device__ __forceinline__ bool named_barrier_all(int barrier, int threads, bool yes) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred yes;\n"
      ".reg .pred all;\n"
      "setp.ne.u32 yes, %3, 0;\n"
      "bar.red.and.pred all, %1, %2, yes;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(yes))
      : "memory");
  return all != 0;
}

}  // namespace flashmoe::ptx
