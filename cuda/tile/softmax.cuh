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

// row_max follows a row's maximum when a score exceeds it by more than this power of two. Until
// then probabilities reach at most 2^8 instead of 1, which neither fp16 nor bf16 nor the fp32 sums
// mind, and accumulators are not touched.
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

// Sets row_max to a row's highest score `top` if that has outgrown it, and rescales its sum.
// Returns what its accumulators are to be multiplied by: 1 if row_max stays.
__device__ __forceinline__ float rescale_row(float top, float scale_log2, float& row_max,
                                             float& sum) {
  const float new_max = row_max_of(top, scale_log2);
  const bool grows = excess(top, scale_log2, row_max) > kLazyBits;
  const float factor = grows ? numeric::exp2_approx(row_max - new_max) : 1.0f;
  row_max = grows ? new_max : row_max;
  sum *= factor;
  return factor;
}

// The same for any `top`: a NaN makes row_max a NaN, and with it the whole row.
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
__device__ __forceinline__ bool any_of_quad(uint32_t value) {
  value |= __shfl_xor_sync(kFullWarp, value, 1);
  return (value | __shfl_xor_sync(kFullWarp, value, 2)) != 0;
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

// What a row comes to behind its last key.
struct RowEnd {
  float lse;
  float factor;       // of its accumulators
  bool rounded_away;  // the row needs the fallback: factor is infinite, by which it can be found
};

// By which functions a quotient and a logarithm are computed.
enum class RowEndBy { kExact, kApprox };

// Some of a row's probabilities: the maximum that they are relative to, and their sum.
struct RowState {
  float row_max;
  float sum;
};

// The sink of a query head, in natural units; -inf where there are none.
template <class Element>
__device__ __forceinline__ float sink_of(const ScoreOptions& options, int head) {
  if (options.sinks == nullptr) return -INFINITY;
  const int64_t at = head * options.sink_stride;
  if (options.sinks_are_fp32 != 0) return static_cast<const float*>(options.sinks)[at];
  return numeric::ElementTraits<Element>::to_float(static_cast<const uint16_t*>(options.sinks)[at]);
}

// A sink counts as so many powers of two: by that much may scores lie below it until their
// probabilities are small numbers, which fp16 rounds.
inline constexpr int kSinkBits = 16;

// A sink is a score that has no value. Its state is what a row begins with, or what is added at its
// end. It is finite: the row of a sink beyond kMostRowMax needs the fallback.
__device__ __forceinline__ RowState state_of_sink(float sink) {
  if (sink == -INFINITY) return {kNoRowMax, 0.0f};
  const float power = sink * kLog2E;
  const float finite = power > -kNoRowMax ? -kNoRowMax : power < kNoRowMax ? kNoRowMax : power;
  return {finite - kSinkBits, static_cast<float>(1 << kSinkBits)};
}

// Ends a row whose sink counts in its state already. One of nothing but -inf scores and no sink is
// 0 / 0 = NaN. lse of one that sees no key is its sink, and its output 0 by definition. `factor`
// brings the accumulators to the state's maximum.
template <RowEndBy kBy>
__device__ __forceinline__ RowEnd end_row(float sink, bool sees_keys, const RowState& state,
                                          float factor = 1.0f) {
  constexpr bool kExact = kBy == RowEndBy::kExact;
  if (!sees_keys) return {sink, 0.0f, false};
  const bool rounded_away = is_rounded_away(state.row_max, state.sum);
  const float quotient = kExact ? 1.0f / state.sum : __fdividef(1.0f, state.sum);
  const float log2_sum = kExact ? log2f(state.sum) : __log2f(state.sum);
  return {(state.row_max + log2_sum) * kLn2, rounded_away ? INFINITY : quotient * factor,
          rounded_away};
}

// Ends a row of a query head, whose sink is still to be added.
template <class Element, RowEndBy kBy>
__device__ __forceinline__ RowEnd add_sink_and_end_row(const ScoreOptions& options, int head,
                                                       bool sees_keys, RowState state) {
  float sink = -INFINITY;
  float factor = 1.0f;
  if (options.sinks != nullptr) {
    sink = sink_of<Element>(options, head);
    const RowState added = state_of_sink(sink);
    const float row_max = fmaxf(state.row_max, added.row_max);
    factor = numeric::exp2_approx(state.row_max - row_max);
    state.sum = fmaf(state.sum, factor, added.sum * numeric::exp2_approx(added.row_max - row_max));
    state.row_max = row_max;
  }
  return end_row<kBy>(sink, sees_keys, state, factor);
}

// Ends a row whose maximum `top` is a score, of any size: `factor` is never infinite for it.
template <class Element>
__device__ __forceinline__ RowEnd end_row_of_scores(const ScoreOptions& options, int head,
                                                    bool sees_keys, float top, float sum) {
  const float sink = sink_of<Element>(options, head);
  if (!sees_keys) return {sink, 0.0f, false};
  const float excess = fmaf(-top, options.scale_log2, sink * kLog2E);
  const float power = numeric::exp2_approx(-fabsf(excess));
  // Whichever is larger is what the others are relative to.
  const bool of_sink = excess > 0.0f;
  const float total = of_sink ? fmaf(sum, power, 1.0f) : sum + power;
  const float log_max = of_sink ? sink : top * (options.scale_log2 * kLn2);
  return {fmaf(log2f(total), kLn2, log_max), (of_sink ? power : 1.0f) / total, false};
}

}  // namespace flashmoe
