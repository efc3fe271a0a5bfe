// fp8 (e4m3) to the 16-bit types, each of which holds every number of it.
#pragma once

#include <cstdint>

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::numeric {

// The four bytes of a word: the lower two as the first pair.
template <class Element>
__device__ __forceinline__ void widen(uint32_t (&pairs)[2], uint32_t bytes) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(bytes));
  if constexpr (ElementTraits<Element>::kDtype != Dtype::kFloat16) {
    // There is no conversion to bf16. By bits it takes as many instructions, but more time.
#pragma unroll
    for (uint32_t& pair : pairs) {
      const float2 wide = ElementTraits<__half>::unpack(pair);
      pair = ElementTraits<Element>::pack(wide.x, wide.y);
    }
  }
}

// One number, by which nothing is timed.
template <class Element>
__device__ __forceinline__ uint16_t widen_one(uint8_t bits) {
  uint32_t pairs[2];
  widen<Element>(pairs, bits);
  return static_cast<uint16_t>(pairs[0]);
}

}  // namespace flashmoe::numeric
