// Loads from a generic address: global or shared memory.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Issues the load where it stands: the compiler does not move it behind later loads.
__device__ __forceinline__ int32_t load_anywhere(const int32_t* address) {
  int32_t word;
  asm volatile("ld.b32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

}  // namespace flashmoe::ptx
