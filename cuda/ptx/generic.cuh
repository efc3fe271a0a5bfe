// Loads from wherever an address says, global or shared memory, and loads to no register.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Sent for where it stands: the compiler does not put it behind what is sent for after it.
__device__ __forceinline__ int32_t load_anywhere(const int32_t* address) {
  int32_t word;
  asm volatile("ld.b32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

// Has the L2 read 128 bytes of global memory, those around an address, if `valid`.
__device__ __forceinline__ void prefetch_l2(const void* address, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %1, 0;\n"
      "@valid prefetch.global.L2 [%0];\n"
      "}\n" ::"l"(address),
      "r"(static_cast<uint32_t>(valid)));
}

}  // namespace flashmoe::ptx
