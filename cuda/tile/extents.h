// Arithmetic of extents, and how many threads go together.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kThreadsPerGroup = 128;  // a warpgroup

// a / b, rounded up: a is not negative, b positive, and their sum within range.
template <class A, class B>
FLASHMOE_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
// By a constant, for kernels: the compiler folds b - 1 into the sum from the start.
template <int kB>
FLASHMOE_HOST_DEVICE constexpr int ceil_div(int a) {
  return (a + kB - 1) / kB;
}
FLASHMOE_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }  // of powers of two

}  // namespace flashmoe

#undef FLASHMOE_HOST_DEVICE
