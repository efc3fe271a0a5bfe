// Activations of the experts with their slopes, on fp32, and gradients through the limits of their
// arguments.
#pragma once

#include "cuda/tile/activation.cuh"

namespace flashmoe {

// Phi(z), computed as in gelu().
__device__ __forceinline__ float normal_distribution(float z) {
  constexpr float kQ = 0.3275911f * 0.70710678118654752f;
  constexpr float kP[5] = {0.5f * 0.254829592f, 0.5f * -0.284496736f, 0.5f * 1.421413741f,
                           0.5f * -1.453152027f, 0.5f * 1.061405429f};
  const float t = reciprocal(fmaf(kQ, fabsf(z), 1.0f));
  const float p = t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, kP[4], kP[3]), kP[2]), kP[1]), kP[0]);
  const float tail = p * numeric::exp2_approx(-0.5f * kLog2E * z * z);
  return z < 0.0f ? tail : 1.0f - tail;
}

// Sets z to act(z) and slope to its slope there, for kernels that select the activation at run
// time. The branch is uniform. Beyond +-kFlat the slope is that of a straight line: factors of a
// vanished term must not overflow. A NaN stays NaN.
template <int kCount>
__device__ __forceinline__ void activate_with_slope(float (&z)[kCount], float (&slope)[kCount],
                                                    int activation, float alpha) {
  constexpr float kFlat = 100.0f;
  constexpr float kFar = 20.0f;  // the densities of both GELUs are 0 there
  const auto cut_to = [](float most, float x) { return cut(x, most); };
  const auto sigmoid = [](float x) { return reciprocal(1.0f + numeric::exp2_approx(-kLog2E * x)); };
  if (activation == FLASHMOE_ACTIVATION_SILU) {  // s + alpha z s (1 - s)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = z[i] * alpha;
      const float s = sigmoid(x);
      slope[i] = fmaf(s, cut_to(kFlat, x) * (1.0f - s), s);
      z[i] *= s;
    }
  } else if (activation == FLASHMOE_ACTIVATION_GELU_TANH) {  // S + z S (1 - S) (2 s)'
    constexpr float kTwoSqrtTwoOverPi = 2.0f * 0.79788456080286536f;
    constexpr float kCubic = 0.044715f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float near = cut_to(kFar, z[i]);
      const float u = near * near;
      const float s = sigmoid(kTwoSqrtTwoOverPi * near * fmaf(kCubic, u, 1.0f));
      const float steep = fmaf(3.0f * kCubic, u, 1.0f) * near * kTwoSqrtTwoOverPi;
      slope[i] = fmaf(s, steep * (1.0f - s), s);
      z[i] = numeric::max_nan(z[i], -kFar) * s;
    }
  } else if (activation == FLASHMOE_ACTIVATION_GELU) {  // Phi(z) + z phi(z)
    constexpr float kDensity = 0.39894228040143268f;
    constexpr float kHalfLog2E = 0.5f * kLog2E;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float near = cut_to(kFar, z[i]);
      const float phi = kDensity * numeric::exp2_approx(-kHalfLog2E * near * near);
      slope[i] = fmaf(near, phi, normal_distribution(near));
      z[i] = gelu(z[i]);
    }
  } else if (activation == FLASHMOE_ACTIVATION_RELU) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      slope[i] = z[i] > 0.0f ? 1.0f : z[i] <= 0.0f ? 0.0f : z[i];
      z[i] = relu(z[i], false);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      slope[i] = 2.0f * relu(z[i], false);
      z[i] = relu(z[i], true);
    }
  }
}

// The gradient through a limit: 0 beyond it, dx at it.
__device__ __forceinline__ float through_cut_above(float x, float limit, float dx) {
  return x > limit ? 0.0f : dx;
}
__device__ __forceinline__ float through_cut(float x, float limit, float dx) {
  return x < -limit ? 0.0f : through_cut_above(x, limit, dx);
}

}  // namespace flashmoe
