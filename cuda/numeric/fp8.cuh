// fp8 (e4m3) to the 16-bit types, each of which holds every number of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::numeric {

// Two numbers, which are byte `low` and byte `high` of the eight of `first` and `second`.
template <class Element>
__device__ __forceinline__ uint32_t widen_pair(uint32_t first, uint32_t second, uint32_t low,
                                               uint32_t high) {
  const uint32_t bytes = __byte_perm(first, second, low | high << 4);
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
  if constexpr (ElementTraits<Element>::kDtype == Dtype::kFloat16) return pair;
  // There is no conversion to bf16. By bits it takes as many instructions, but more time.
  const float2 wide = ElementTraits<__half>::unpack(pair);
  return ElementTraits<Element>::pack(wide.x, wide.y);
}

// One number, by which nothing is timed.
template <class Element>
__device__ __forceinline__ uint16_t widen_one(uint8_t bits) {
  return static_cast<uint16_t>(widen_pair<Element>(bits, 0, 0, 0));
}

}  // namespace flashmoe::numeric
