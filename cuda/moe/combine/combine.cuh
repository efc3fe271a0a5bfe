// Combine: out[t] = sum_k weights[t, k] * y[slots[t, k]], in fp32, in the order of k.
//
// A thread has a 16-byte piece of a token's row. It loads that piece of kBatch rows before it adds
// them up, so that a multiprocessor has some 100 KiB in flight: the kernel reads and writes each
// byte once, and runs at the speed of memory. Invalid slots are skipped.
#pragma once

#include "cuda/moe/combine/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe_combine {

inline constexpr int kPiece = 8;  // elements per 16 bytes
inline constexpr int kMaxThreads = 256;

template <class Element, int kBatch>
__global__ void __launch_bounds__(kMaxThreads, 4)
    moe_combine_kernel(const __grid_constant__ Params params) {
  using Numeric = numeric::ElementTraits<Element>;
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int piece = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (token >= params.tokens || piece >= params.pieces) return;
  const int64_t first_pair = token * params.top_k;
  const uint16_t* y = params.y + piece * kPiece;

  // Loads something even without weights: loads without branches are all issued at once.
  const float* loaded_weights =
      params.weights != nullptr ? params.weights : reinterpret_cast<const float*>(params.slots);

  float sum[kPiece] = {};
  for (int k = 0; k < params.top_k; k += kBatch) {
    uint32_t data[kBatch][kPiece / 2];
    float weights[kBatch];
    int slots[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t pair = first_pair + min(k + i, params.top_k - 1);
      slots[i] = params.slots[pair];
      weights[i] = loaded_weights[pair];
      if (k + i >= params.top_k) slots[i] = -1;
      if (params.weights == nullptr) weights[i] = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool valid = slots[i] >= 0 && slots[i] < params.rows;
      ptx::load_streaming(data[i], y + (valid ? slots[i] : 0) * params.y_stride);
      if (!valid) {
        weights[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kPiece / 2; ++j) data[i][j] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPiece / 2; ++j) {
        const uint32_t pair = data[i][j];
        sum[2 * j] = fmaf(weights[i], Numeric::to_float(static_cast<uint16_t>(pair)), sum[2 * j]);
        sum[2 * j + 1] =
            fmaf(weights[i], Numeric::to_float(static_cast<uint16_t>(pair >> 16)), sum[2 * j + 1]);
      }
    }
  }
  const uint4 packed = make_uint4(Numeric::pack(sum[0], sum[1]), Numeric::pack(sum[2], sum[3]),
                                  Numeric::pack(sum[4], sum[5]), Numeric::pack(sum[6], sum[7]));
  *reinterpret_cast<uint4*>(params.out + token * params.out_stride + piece * kPiece) = packed;
}

}  // namespace flashmoe::moe_combine
