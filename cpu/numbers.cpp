#include "cpu/numbers.h"

#include <cstring>

#include "cpu/attention_numeric.h"
#include "cpu/e4m3.h"

namespace flashmoe::cpu {
namespace {

#include "cpu/simd_portable.h"

template <typename T>
void widen_as(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += Simd::kLanes) {
    Simd::store_first(to + i, Simd::load_first(from + i, count - i), count - i);
  }
}

template <typename T>
void narrow_as(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += Simd::kLanes) {
    Simd::store_first(to + i, Simd::load_first(from + i, count - i), count - i);
  }
}

void widen_e4m3(const uint8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = kE4m3Values[from[i]];
}

// Rounds to nearest even. Numbers beyond the largest saturate to it, and NaN stays NaN.
uint8_t e4m3_of(float x) {
  constexpr uint32_t kMost = 0x43e00000;         // 448
  constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t code = 0x7f;
  if (magnitude <= 0x7f800000) {
    if (magnitude > kMost) magnitude = kMost;
    if (magnitude < kLeastNormal) {
      // Rounds to a multiple of 2^-9, the spacing of fp32 numbers from 2^14 to 2^15.
      constexpr float kShift = 16384.0f;
      float shifted;
      std::memcpy(&shifted, &magnitude, sizeof shifted);
      shifted += kShift;
      std::memcpy(&code, &shifted, sizeof code);
      code &= 15;  // 8 is the least normal number
    } else {
      const uint32_t even = magnitude >> 20 & 1;
      code = (magnitude + 0x7ffff + even - (120u << 23)) >> 20;
    }
  } else {
    sign = 0;  // one NaN
  }
  return static_cast<uint8_t>(sign | code);
}

void narrow_e4m3(const float* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = e4m3_of(from[i]);
}

}  // namespace

void widen(const void* from, Dtype dtype, int64_t first, int64_t count, float* to) {
  switch (dtype) {
    case Dtype::kFloat32: return widen_as(static_cast<const float*>(from) + first, count, to);
    case Dtype::kFloat16: return widen_as(static_cast<const Fp16*>(from) + first, count, to);
    case Dtype::kBFloat16: return widen_as(static_cast<const Bf16*>(from) + first, count, to);
    case Dtype::kFloat8E4M3:
      return widen_e4m3(static_cast<const uint8_t*>(from) + first, count, to);
    case Dtype::kFloat64: break;  // attention only
  }
}

void narrow(const float* from, int64_t count, void* to, Dtype dtype, int64_t first) {
  switch (dtype) {
    case Dtype::kFloat32: return narrow_as(from, count, static_cast<float*>(to) + first);
    case Dtype::kFloat16: return narrow_as(from, count, static_cast<Fp16*>(to) + first);
    case Dtype::kBFloat16: return narrow_as(from, count, static_cast<Bf16*>(to) + first);
    case Dtype::kFloat8E4M3: return narrow_e4m3(from, count, static_cast<uint8_t*>(to) + first);
    case Dtype::kFloat64: break;
  }
}

}  // namespace flashmoe::cpu
