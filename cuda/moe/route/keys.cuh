// The order of a token's experts: by choice, then the lower expert first. A key is greater than
// another exactly if its expert comes first, and no two are equal. 0 means no key.
#pragma once

#include <cstdint>

#include "cuda/moe/route/params.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe_route {

inline constexpr uint32_t kLastExpert = 1023;

// NaN is last, like -inf, and -0 equals 0.
__device__ __forceinline__ float canonical(float choice) { return fmaxf(choice, -INFINITY) + 0.0f; }

// Bits with the order of their floats. Above 0, except for a NaN.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const auto bits = static_cast<int32_t>(__float_as_uint(value));
  return static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}

__device__ __forceinline__ float value_of_ordered_bits(uint32_t ordered) {
  const auto bits = static_cast<int32_t>(ordered);
  return __uint_as_float(static_cast<uint32_t>(bits ^ (~(bits >> 31) | INT32_MIN)));
}

// For choices that are 16-bit floats: as fp32 their low 13 bits are 0, and hold the expert.
struct Key32 {
  using Type = uint32_t;
  static constexpr int kVector = 8;  // logits per load
  static constexpr bool kAnyChoice = false;

  static __device__ __forceinline__ Type of(float choice, int expert) {
    return (ordered_bits(canonical(choice)) & ~kLastExpert) |
           (kLastExpert - static_cast<uint32_t>(expert));
  }
  static __device__ __forceinline__ Type warp_max(Type key) {
    return __reduce_max_sync(kFullWarp, key);
  }
  static __device__ __forceinline__ int expert(Type key) {
    return static_cast<int>(kLastExpert - (key & kLastExpert));
  }
  static __device__ __forceinline__ float choice(Type key) {
    // The bits of a negative float are all inverted, including the zeros at the end.
    const uint32_t bits = key & ~kLastExpert;
    return value_of_ordered_bits(static_cast<int32_t>(key) < 0 ? bits : bits | kLastExpert);
  }
};

// For any choice.
struct Key64 {
  using Type = uint64_t;
  static constexpr int kVector = 4;
  static constexpr bool kAnyChoice = true;

  static __device__ __forceinline__ Type of(float choice, int expert) {
    return Type{ordered_bits(canonical(choice))} << 32 |
           (kLastExpert - static_cast<uint32_t>(expert));
  }
  // The key of an expert that must not be chosen. Only the absence of a key comes after it.
  static __device__ __forceinline__ Type excluded(int expert) {
    return kLastExpert - static_cast<uint32_t>(expert);
  }
  static __device__ __forceinline__ Type warp_max(Type key) {
    const auto high = static_cast<uint32_t>(key >> 32);
    const uint32_t most = __reduce_max_sync(kFullWarp, high);
    const uint32_t low = high == most ? static_cast<uint32_t>(key) : 0;
    return Type{most} << 32 | __reduce_max_sync(kFullWarp, low);
  }
  static __device__ __forceinline__ int expert(Type key) {
    return static_cast<int>(kLastExpert - static_cast<uint32_t>(key));
  }
  static __device__ __forceinline__ float choice(Type key) {
    return value_of_ordered_bits(static_cast<uint32_t>(key >> 32));
  }
};

template <class Type>
__device__ __forceinline__ void put_in_order(Type& first, Type& second) {
  const bool turn = second > first;
  const Type greater = turn ? second : first;
  second = turn ? first : second;
  first = greater;
}

// Batcher's odd-even merge sort, greatest first. It is recursive because nested loops with such
// bounds would not be unrolled, and the keys would not be in registers.
template <int kFirst, int kCount, int kStep, int kAll, class Type>
__device__ __forceinline__ void merge(Type (&keys)[kAll]) {
  if constexpr (2 * kStep < kCount) {
    merge<kFirst, kCount, 2 * kStep>(keys);
    merge<kFirst + kStep, kCount, 2 * kStep>(keys);
#pragma unroll
    for (int i = kFirst + kStep; i + kStep < kFirst + kCount; i += 2 * kStep) {
      put_in_order(keys[i], keys[i + kStep]);
    }
  } else {
    put_in_order(keys[kFirst], keys[kFirst + kStep]);
  }
}

template <int kFirst, int kCount, int kAll, class Type>
__device__ __forceinline__ void sort(Type (&keys)[kAll]) {
  if constexpr (kCount > 1) {
    sort<kFirst, kCount / 2>(keys);
    sort<kFirst + kCount / 2, kCount / 2>(keys);
    merge<kFirst, kCount, 1>(keys);
  }
}

}  // namespace flashmoe::moe_route
