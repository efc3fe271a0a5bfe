// Converts fp8 (e4m3) to the 16-bit types, each of which represents every fp8 number.
#pragma once

#include <cstdint>

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::numeric {

// Widens the four bytes of a word. The lower two bytes become the first pair.
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
    // PTX has no conversion to bf16. Bit operations would take as many instructions, but more time.
#pragma unroll
    for (uint32_t& pair : pairs) {
      const float2 wide = ElementTraits<__half>::unpack(pair);
      pair = ElementTraits<Element>::pack(wide.x, wide.y);
    }
  }
}

// Widens one number. It is not on a fast path.
template <class Element>
__device__ __forceinline__ uint16_t widen_one(uint8_t bits) {
  uint32_t pairs[2];
  widen<Element>(pairs, bits);
  return static_cast<uint16_t>(pairs[0]);
}

}  // namespace flashmoe::numeric
