// Activations of the experts, on fp32 sums.
#pragma once

#include "cuda/moe/stream/params.h"
#include "cuda/numeric/tanh.cuh"
#include "flashmoe/flashmoe.h"

namespace flashmoe::moe::stream {

__device__ __forceinline__ float times_sigmoid(float z, float slope_log2) {
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(sigmoid)
      : "f"(1.0f + numeric::exp2_approx(-z * slope_log2)));
  return z * sigmoid;
}

// act of each, in place. The branch is uniform. A NaN stays one.
template <int kCount>
__device__ __forceinline__ void activate(float (&z)[kCount], int activation, float alpha) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kSqrtHalf = 0.70710678118654752f;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
  if (activation == FLASHMOE_ACTIVATION_SILU) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = times_sigmoid(z[i], kLog2E * alpha);
  } else if (activation == FLASHMOE_ACTIVATION_GELU) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = 0.5f * z[i] * erfcf(-z[i] * kSqrtHalf);
  } else if (activation == FLASHMOE_ACTIVATION_GELU_TANH) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float cubic = kSqrtTwoOverPi * fmaf(0.044715f * z[i] * z[i], z[i], z[i]);
      z[i] = 0.5f * z[i] * (1.0f + numeric::tanh(cubic));
    }
  } else {
    const bool squared = activation == FLASHMOE_ACTIVATION_RELU2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float positive = z[i] < 0.0f ? 0.0f : z[i];
      z[i] = squared ? positive * positive : positive;
    }
  }
}

// A limit cuts a gate to at most itself, an up also to no less than its negative; a NaN stays one.
__device__ __forceinline__ float cut_above(float z, float limit) { return z > limit ? limit : z; }
__device__ __forceinline__ float cut(float z, float limit) {
  return z < -limit ? -limit : cut_above(z, limit);
}

}  // namespace flashmoe::moe::stream
