// The online softmax of a row, whose probabilities are 2^(score * scale_log2 - row_max).
#pragma once

#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/score_options.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe {

// Below every maximum of a row's scores, yet finite: masked scores less it are -inf, not NaN.
inline constexpr float kNoRowMax = -1.0e38f;

// The FMA of a probability rounds the difference alone, but row_max is a product that was rounded.
// It is rounded up, so that no probability of the scores that it was made of exceeds 1 and
// overflows, and up to this magnitude by less than 4, so that none of a row's highest ones
// vanishes.
inline constexpr float kMostRowMax = 67108864.0f;  // 2^26

// A row's maximum is raised when a score exceeds it by more than this power of two. Until then
// probabilities reach at most 2^8 instead of 1, which neither fp16 nor bf16 nor the fp32 sums mind,
// and accumulators are not touched.
inline constexpr float kLazyBits = 8.0f;

__device__ __forceinline__ float row_max_of(float top, float scale_log2) {
  return __fmul_ru(top, scale_log2);
}

// How much a score exceeds a row's maximum, in powers of two.
__device__ __forceinline__ float excess(float score, float scale_log2, float row_max) {
  return fmaf(score, scale_log2, -row_max);
}

__device__ __forceinline__ float probability(float score, float scale_log2, float row_max) {
  return numeric::exp2_approx(excess(score, scale_log2, row_max));
}

// Raises a row's maximum if its highest score `top` has outgrown it, and rescales its sum. What its
// accumulators are to be multiplied by: 1 if the maximum stays.
__device__ __forceinline__ float rescale_row(float top, float scale_log2, float& row_max,
                                             float& sum) {
  const float new_max = row_max_of(top, scale_log2);
  const bool grows = excess(top, scale_log2, row_max) > kLazyBits;
  const float factor = grows ? numeric::exp2_approx(row_max - new_max) : 1.0f;
  row_max = grows ? new_max : row_max;
  sum *= factor;
  return factor;
}

// The same for any `top`: a NaN raises the maximum to NaN, and with it the whole row.
__device__ __forceinline__ float rescale_row_nan(float top, float scale_log2, float& row_max,
                                                 float& sum) {
  const bool stays = excess(top, scale_log2, row_max) <= kLazyBits;
  const float new_max = stays ? row_max : row_max_of(top, scale_log2);
  const float factor = numeric::exp2_approx(row_max - new_max);
  row_max = new_max;
  sum *= factor;
  return factor;
}

// Of a row of a fragment of products, four lanes side by side: their largest, and their sum.
__device__ __forceinline__ float max_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ __forceinline__ float max_nan_of_quad(float value) {
  value = numeric::max_nan(value, __shfl_xor_sync(kFullWarp, value, 1));
  return numeric::max_nan(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ __forceinline__ float sum_of_quad(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// Whether a row that sees keys may have lost all of its probabilities to the rounding of row_max. A
// NaN of its scores is no such loss.
__device__ __forceinline__ bool is_rounded_away(float row_max, float sum) {
  return fabsf(row_max) > kMostRowMax && sum == sum;
}

// log(sum * 2^row_max), of a row that sees keys: else it is -inf.
__device__ __forceinline__ float log_sum_exp(float row_max, float sum) {
  return (row_max + log2f(sum)) * kLn2;
}
__device__ __forceinline__ float log_sum_exp_approx(float row_max, float sum) {
  return (row_max + __log2f(sum)) * kLn2;
}

// What a row comes to behind its last key.
struct RowEnd {
  float lse;
  float factor;       // of its accumulators
  bool rounded_away;  // the row needs the fallback: factor is infinite, by which it can be found
};

// By which functions a quotient and a logarithm are computed.
enum class RowEndBy { kExact, kApprox };

// lse of a row of a query head that sees no key. Its output is 0 by definition.
template <class Element>
__device__ __forceinline__ float lse_of_no_keys(const ScoreOptions&, int) {
  return -INFINITY;
}

// Ends a row of a query head. One of nothing but -inf scores is 0 / 0 = NaN.
template <class Element, RowEndBy kBy>
__device__ __forceinline__ RowEnd end_row(const ScoreOptions& options, int head, bool sees_keys,
                                          float row_max, float sum) {
  constexpr bool kExact = kBy == RowEndBy::kExact;
  if (!sees_keys) return {lse_of_no_keys<Element>(options, head), 0.0f, false};
  const bool rounded_away = is_rounded_away(row_max, sum);
  const float quotient = kExact ? 1.0f / sum : __fdividef(1.0f, sum);
  return {kExact ? log_sum_exp(row_max, sum) : log_sum_exp_approx(row_max, sum),
          rounded_away ? INFINITY : quotient, rounded_away};
}

// The same where the maximum `top` is a score, of any size, and `factor` is never infinite for it.
template <class Element>
__device__ __forceinline__ RowEnd end_row_of_scores(const ScoreOptions& options, int head,
                                                    bool sees_keys, float top, float sum) {
  if (!sees_keys) return {lse_of_no_keys<Element>(options, head), 0.0f, false};
  return {fmaf(log2f(sum), kLn2, top * (options.scale_log2 * kLn2)), 1.0f / sum, false};
}

}  // namespace flashmoe
