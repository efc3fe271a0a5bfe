// Arithmetic of extents, and numbers of threads per warp and warpgroup.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kThreadsPerGroup = 128;  // a warpgroup

// ceil_div by a constant, for kernels: the compiler folds b - 1 into the sum early.
template <int kB>
FLASHMOE_HOST_DEVICE constexpr int ceil_div(int a) {
  return (a + kB - 1) / kB;
}
FLASHMOE_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }  // n is a power of two

}  // namespace flashmoe

#undef FLASHMOE_HOST_DEVICE
