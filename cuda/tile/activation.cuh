// Activations of the experts on fp32 sums, and the limits of their arguments.
#pragma once

#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "flashmoe/moe.h"

namespace flashmoe {

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// z * sigmoid(exponent * ln 2).
__device__ __forceinline__ float times_sigmoid(float z, float exponent) {
  return z * reciprocal(1.0f + numeric::exp2_approx(-exponent));
}

// z * Phi(z) by Phi(-|z|) = e^(-z^2/2) p(t) / 2, t = 1 / (1 + q |z|), Abramowitz and Stegun 7.1.26.
// The error is below 4.3e-7, and above z = -6 below 0.4 % of the value. z (1 + erf) / 2 by erff
// would lose all digits below z = -5, where bf16 still has values.
__device__ __forceinline__ float gelu(float z) {
  constexpr float kQ = 0.3275911f * 0.70710678118654752f;
  constexpr float kP1 = 0.5f * 0.254829592f;
  constexpr float kP2 = 0.5f * -0.284496736f;
  constexpr float kP3 = 0.5f * 1.421413741f;
  constexpr float kP4 = 0.5f * -1.453152027f;
  constexpr float kP5 = 0.5f * 1.061405429f;
  constexpr float kHalfLog2E = 0.72134752044448170f;
  const float t = reciprocal(fmaf(kQ, fabsf(z), 1.0f));
  const float p = t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, kP5, kP4), kP3), kP2), kP1);
  const float tail = p * numeric::exp2_approx(-kHalfLog2E * z * z);  // Phi(-|z|)
  return z * (z < 0.0f ? tail : 1.0f - tail);
}

// max(z, 0), or its square. A NaN stays NaN.
__device__ __forceinline__ float relu(float z, bool squared) {
  const float positive = numeric::max_nan(z, 0.0f);
  return squared ? positive * positive : positive;
}

// Applies the activation to kCount values in place, for kernels that select it at run time. The
// branch is uniform.
template <int kCount>
__device__ __forceinline__ void activate(float (&z)[kCount], int activation, float alpha) {
  // tanh(s) = 2 sigmoid(2 s) - 1 with s = sqrt(2 / pi) (z + 0.044715 z^3).
  constexpr float kTanhSlope = 2.0f * 0.79788456080286536f * kLog2E;
  if (activation == FLASHMOE_ACTIVATION_SILU) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = times_sigmoid(z[i], z[i] * (alpha * kLog2E));
  } else if (activation == FLASHMOE_ACTIVATION_GELU_TANH) {
    constexpr float kCubic = 0.044715f * kTanhSlope;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      z[i] = times_sigmoid(z[i], z[i] * fmaf(kCubic * z[i], z[i], kTanhSlope));
    }
  } else if (activation == FLASHMOE_ACTIVATION_GELU) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = gelu(z[i]);
  } else {
    const bool squared = activation == FLASHMOE_ACTIVATION_RELU2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = relu(z[i], squared);
  }
}

// A limit bounds a gate from above, and an up from both sides. A NaN stays NaN.
__device__ __forceinline__ float cut_above(float z, float limit) {
  return numeric::min_nan(z, limit);
}
__device__ __forceinline__ float cut(float z, float limit) {
  return numeric::max_nan(cut_above(z, limit), -limit);
}

}  // namespace flashmoe
