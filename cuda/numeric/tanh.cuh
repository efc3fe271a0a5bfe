// tanh for the softcap of logits.
#pragma once

#include "core/tanh.h"
#include "cuda/numeric/dtype.cuh"

namespace flashmoe::numeric {

// tanh(x) to a relative error of 5e-7, with one MUFU division and twelve other instructions. The
// hardware's tanh.approx is off by up to 2^-11, which a softcap would multiply. 1 - 2 / (1 + e^2x)
// loses the small values of a large softcap. A NaN stays NaN.
__device__ __forceinline__ float tanh(float x) {
  using namespace tanh_fit;
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-kClamp));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(kClamp));
  const float u = x * x;
  const float p = fmaf(fmaf(fmaf(fmaf(kP4, u, kP3), u, kP2), u, kP1), u, kP0);
  const float q = fmaf(fmaf(fmaf(fmaf(kQ4, u, kQ3), u, kQ2), u, kQ1), u, kQ0);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(q));
  return x * p * inverse;
}

// The same with fewer registers and two MUFU operations: 1 - 2 / (1 + e^2x), and x - x^3 / 3 where
// that would lose digits. The absolute error is below 3e-7, the relative one below 5e-6.
__device__ __forceinline__ float tanh_brief(float x) {
  constexpr float kLog2ESquared = 2.8853900817779268f;  // 2^(2 log2(e) x) is e^2x
  constexpr float kSmall = 0.05f;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_approx(x * kLog2ESquared) + 1.0f));
  const float series = fmaf(x * x * x, -1.0f / 3.0f, x);
  return fabsf(x) < kSmall ? series : fmaf(-2.0f, inverse, 1.0f);
}

}  // namespace flashmoe::numeric
