#include "cpu/numbers.h"

#include "cpu/attention_numeric.h"

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

}  // namespace

void widen(const void* from, Dtype dtype, int64_t first, int64_t count, float* to) {
  switch (dtype) {
    case Dtype::kFloat32: return widen_as(static_cast<const float*>(from) + first, count, to);
    case Dtype::kFloat16: return widen_as(static_cast<const Fp16*>(from) + first, count, to);
    case Dtype::kBFloat16: return widen_as(static_cast<const Bf16*>(from) + first, count, to);
    case Dtype::kFloat64: break;  // of attention alone
  }
}

void narrow(const float* from, int64_t count, void* to, Dtype dtype, int64_t first) {
  switch (dtype) {
    case Dtype::kFloat32: return narrow_as(from, count, static_cast<float*>(to) + first);
    case Dtype::kFloat16: return narrow_as(from, count, static_cast<Fp16*>(to) + first);
    case Dtype::kBFloat16: return narrow_as(from, count, static_cast<Bf16*>(to) + first);
    case Dtype::kFloat64: break;
  }
}

}  // namespace flashmoe::cpu
