// The 16-bit element types: names, packing, bit patterns, and arithmetic on two of them in a word.
//
// The compiler estimates the length of a piece of assembly from its braces, semicolons and line
// breaks, and decides by it what to unroll. All pieces of one instruction therefore have the same
// form.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "core/dtype.h"
#include "cuda/numeric/element.h"

namespace flashmoe::numeric {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__half> {
  static constexpr Dtype kDtype = Dtype::kFloat16;
  static constexpr const char* kName = "fp16";
  static constexpr uint32_t kExponentMask = 0x7c00;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("{ cvt.rn.f16x2.f32 %0, %2, %1; }\n" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    uint16_t bits;
    asm("{ cvt.rn.f16.f32 %0, %1; }\n" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    float value;
    asm("{ cvt.f32.f16 %0, %1; }\n" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    float2 values;
    asm("{ .reg .f16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.f32.f16 %0, low; }\n"
        : "=f"(values.x)
        : "r"(pair));
    asm("{ .reg .f16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.f32.f16 %0, high; }\n"
        : "=f"(values.y)
        : "r"(pair));
    return values;
  }
};

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr Dtype kDtype = Dtype::kBFloat16;
  static constexpr const char* kName = "bf16";
  static constexpr uint32_t kExponentMask = 0x7f80;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("{ cvt.rn.bf16x2.f32 %0, %2, %1; }\n" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    uint16_t bits;
    asm("{ cvt.rn.bf16.f32 %0, %1; }\n" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    float value;
#if __CUDA_ARCH__ >= 900
    asm("{ cvt.f32.bf16 %0, %1; }\n" : "=f"(value) : "h"(bits));
#else
    asm("{ mov.b32 %0, {0, %1}; }\n" : "=f"(value) : "h"(bits));
#endif
    return value;
  }
  // An fp32 number begins with the bits of a bf16 one.
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
    return *reinterpret_cast<const float2*>(bits);
  }
};

// One instruction on pairs of Element: its name, its operands, and the arguments of `asm`.
#define FLASHMOE_PAIR_ASM(name, operands, ...)                       \
  if constexpr (ElementTraits<Element>::kDtype == Dtype::kFloat16) { \
    asm("{ " name ".f16x2 " operands "; }\n" : __VA_ARGS__);         \
  } else {                                                           \
    asm("{ " name ".bf16x2 " operands "; }\n" : __VA_ARGS__);        \
  }

// The larger magnitudes of two pairs of elements. NaN if either is NaN.
template <class Element>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
  uint32_t larger;
  FLASHMOE_PAIR_ASM("abs", "%0, %1", "=r"(a) : "r"(a))
  FLASHMOE_PAIR_ASM("abs", "%0, %1", "=r"(b) : "r"(b))
  FLASHMOE_PAIR_ASM("max.NaN", "%0, %1, %2", "=r"(larger) : "r"(a), "r"(b))
  return larger;
}

// All ones in the halves that are not zero. PTX has it for bf16 from sm_90 on.
template <class Element>
__device__ __forceinline__ uint32_t mask_of_nonzero(uint32_t pair) {
  uint32_t mask;
  FLASHMOE_PAIR_ASM("set.neu.u32", "%0, %1, %2", "=r"(mask) : "r"(pair), "r"(0))
  return mask;
}

// a b of pairs. PTX has it for bf16 from sm_90 on.
template <class Element>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product;
  FLASHMOE_PAIR_ASM("mul", "%0, %1, %2", "=r"(product) : "r"(a), "r"(b))
  return product;
}

// a b + c of pairs, rounded once.
template <class Element>
__device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  FLASHMOE_PAIR_ASM("fma.rn", "%0, %1, %2, %3", "=r"(sum) : "r"(a), "r"(b), "r"(c))
  return sum;
}

#undef FLASHMOE_PAIR_ASM

// Records whether any of many pairs of elements is not finite. Each half of `gathered` is zero
// until the first infinity or NaN in that half, and NaN afterwards. It costs one FMA per pair;
// max_magnitude is slower.
template <class Element>
__device__ __forceinline__ uint32_t gather_nonfinite(uint32_t gathered, uint32_t pair) {
  return fma<Element>(pair, 0, gathered);
}

// Whether either of a pair of elements is an infinity or a NaN: its exponent bits are all ones.
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

// The larger and the smaller of two values. NaN if either is NaN.
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
