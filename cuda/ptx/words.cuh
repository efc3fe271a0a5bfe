// Loads and copies of 4, 8 or 16 bytes of global memory. Both addresses are multiples of the size,
// which may be less than 16.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Goes through the L1. sm_80 and newer.
template <int kBytes>
__device__ __forceinline__ void cp_async_cached(uint32_t destination, const void* source) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(destination), "l"(source),
               "n"(kBytes)
               : "memory");
}

// This is not ld.global.nc, which promises that nothing writes the data from the kernel's start on:
// the previous launch may not have ended then. sm_70 and newer.
__device__ __forceinline__ void load_words(uint32_t (&words)[1], const void* address) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(address));
}
__device__ __forceinline__ void load_words(uint32_t (&words)[2], const void* address) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
}
__device__ __forceinline__ void load_words(uint32_t (&words)[4], const void* address) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

}  // namespace flashmoe::ptx
