// Stores of 16 bytes of global memory at once. If the compiler merges branches that each store a
// struct of four words, it splits the stores into words.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Stays behind all earlier reads of the program. `address` is a multiple of 16.
__device__ __forceinline__ void store_global(void* address, uint32_t x, uint32_t y, uint32_t z,
                                             uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

}  // namespace flashmoe::ptx
