// A number that no other block gets.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Adds 1 to a word, and gives what it was. What this thread reads from here on is not from before,
// out of the L1 either. sm_70 and newer.
__device__ __forceinline__ uint32_t claim_acquire(uint32_t* address) {
  uint32_t was;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(was)
               : "l"(address)
               : "memory");
  return was;
}

}  // namespace flashmoe::ptx
