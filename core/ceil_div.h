// Division that rounds up, for host code and for kernels.
#pragma once

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe {

// a / b, rounded up: a is not negative, b positive. On the host nothing overflows; kernels, which
// take fewer instructions, need the sum of a and b within range.
template <class A, class B>
FLASHMOE_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
#ifdef __CUDA_ARCH__
  return (a + b - 1) / b;
#else
  return a / b + (a % b != 0);
#endif
}

}  // namespace flashmoe

#undef FLASHMOE_HOST_DEVICE
