// The 16-bit element types: names, packing and bit patterns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe::numeric {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__half> {
  static constexpr Dtype kDtype = Dtype::kFloat16;
  static constexpr const char* kName = "fp16";
  static constexpr uint32_t kExponentMask = 0x7c00;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  using Pair = __half2;
};

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr Dtype kDtype = Dtype::kBFloat16;
  static constexpr const char* kName = "bf16";
  static constexpr uint32_t kExponentMask = 0x7f80;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
  // An fp32 number begins with the bits of a bf16 one.
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
    return *reinterpret_cast<const float2*>(bits);
  }
  using Pair = __nv_bfloat162;
};

// The larger magnitudes of two pairs of elements; NaN if one is.
template <class Element>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
  using Pair = typename ElementTraits<Element>::Pair;
  const Pair larger = __hmax2_nan(__habs2(*reinterpret_cast<const Pair*>(&a)),
                                  __habs2(*reinterpret_cast<const Pair*>(&b)));
  return *reinterpret_cast<const uint32_t*>(&larger);
}

// All ones in the halves that are not zero.
template <class Element>
__device__ __forceinline__ uint32_t mask_of_nonzero(uint32_t pair) {
  using Pair = typename ElementTraits<Element>::Pair;
  const uint32_t zero = 0;
  return __hneu2_mask(*reinterpret_cast<const Pair*>(&pair), *reinterpret_cast<const Pair*>(&zero));
}

// Remembers whether one of many pairs of elements was not finite: each half of what is gathered is
// a zero until the first infinity or NaN in that half, and NaN from there on. One FMA a pair, where
// max_magnitude is slower.
template <class Element>
__device__ __forceinline__ uint32_t gather_nonfinite(uint32_t gathered, uint32_t pair) {
  using Pair = typename ElementTraits<Element>::Pair;
  const uint32_t zero = 0;
  const Pair sum =
      __hfma2(*reinterpret_cast<const Pair*>(&pair), *reinterpret_cast<const Pair*>(&zero),
              *reinterpret_cast<const Pair*>(&gathered));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// Whether one of a pair of elements is an infinity or a NaN: its exponent bits are all ones.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(uint32_t pair) {
  constexpr uint32_t kLow = ElementTraits<Element>::kExponentMask;
  constexpr uint32_t kHigh = kLow << 16;
  return (pair & kLow) == kLow || (pair & kHigh) == kHigh;
}

// 2^x, by the MUFU unit: relative error 2^-22, -inf gives 0 (PTX ISA, ex2.approx.ftz.f32).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger and the smaller of two values, NaN if one is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

}  // namespace flashmoe::numeric
