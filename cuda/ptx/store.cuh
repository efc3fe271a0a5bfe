// A store of 16 bytes to global memory.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// At once, also where the compiler would make words of it: of stores that several branches have.
__device__ __forceinline__ void store_words(void* address, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace flashmoe::ptx
