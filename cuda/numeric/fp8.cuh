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
  if constexpr (ElementTraits<Element>::kDtype == Dtype::kFloat16) {
    const uint32_t bytes = __byte_perm(first, second, low | high << 4);
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
  } else {
    // A sign, four bits of exponent and three of fraction become a bf16 of an exponent that is 120
    // less than it should be, which a product makes good: of subnormal numbers, too.
    const uint32_t bytes = __byte_perm(first, second, low << 4 | high << 12);  // in upper bytes
    const uint32_t small = (bytes >> 4 & 0x07f007f0u) | (bytes & 0x80008000u);
    constexpr uint32_t kTwoTo120 = 0x7b807b80u;
    constexpr uint32_t kZero = 0;
    // All ones but for a sign are a NaN: that many steps above them is infinity, which times 0 is.
    constexpr uint32_t kToInfinity = 0x77907790u;
    using Pair = __nv_bfloat162;
    const auto pair_of = [](const uint32_t& bits) { return *reinterpret_cast<const Pair*>(&bits); };
    const uint32_t beyond = small + kToInfinity;
    const Pair value = __hfma2(pair_of(beyond), pair_of(kZero),
                               __hmul2(pair_of(small), pair_of(kTwoTo120)));
    return *reinterpret_cast<const uint32_t*>(&value);
  }
}

// One number, by which nothing is timed.
template <class Element>
__device__ __forceinline__ uint16_t widen_one(uint8_t bits) {
  return static_cast<uint16_t>(widen_pair<Element>(bits, 0, 0, 0));
}

}  // namespace flashmoe::numeric
