// Loads from wherever an address says: global or shared memory.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Sent for where it stands: the compiler does not put it behind what is sent for after it.
__device__ __forceinline__ int32_t load_anywhere(const int32_t* address) {
  int32_t word;
  asm volatile("ld.b32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

}  // namespace flashmoe::ptx
