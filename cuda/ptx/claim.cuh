// A counter that gives each block a different number.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Adds 1 to a word and returns its old value. Later reads of this thread see no data from before
// the claim, not even from the L1. sm_70 and newer.
__device__ __forceinline__ uint32_t claim_acquire(uint32_t* address) {
  uint32_t was;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(was)
               : "l"(address)
               : "memory");
  return was;
}

}  // namespace flashmoe::ptx
