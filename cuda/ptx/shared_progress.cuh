// A word of shared memory by which one thread of a block tells others how far something is. sm_70
// and newer.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// With the word comes all that the other has written or seen before. A plain load in a loop ptxas
// may take out of it.
__device__ __forceinline__ uint32_t load_shared_acquire(uint32_t address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_release(uint32_t address, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace flashmoe::ptx
