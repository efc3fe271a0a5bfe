// The bias of one of each expert's matrices.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include "cuda/numeric/dtype.cuh"
#endif

namespace flashmoe {

// [experts, rows]; data is nullptr without a bias.
struct Bias {
  const void* data;
  int64_t expert_stride;  // elements
  int64_t row_stride;
  int32_t is_fp32;  // else of the elements' type
};

#ifdef __CUDACC__

template <class Element>
__device__ __forceinline__ float load_bias(const Bias& bias, int expert, int row) {
  const int64_t index = expert * bias.expert_stride + row * bias.row_stride;
  if (bias.is_fp32 != 0) return static_cast<const float*>(bias.data)[index];
  return numeric::ElementTraits<Element>::to_float(static_cast<const uint16_t*>(bias.data)[index]);
}

#endif

}  // namespace flashmoe
