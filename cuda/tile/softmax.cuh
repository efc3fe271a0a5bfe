// The online softmax of a row. Its probabilities are 2^(score * scale_log2 - row_max).
#pragma once

#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/score_options.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe {

// Below every row max, yet finite: a masked score minus it is -inf, not NaN.
inline constexpr float kNoRowMax = -1.0e38f;

// The FMA of a probability rounds only the difference, but row_max is a rounded product. It is
// rounded up, so that no probability of its scores exceeds 1 and overflows. Up to this magnitude it
// is rounded up by less than 4, so that none of a row's highest probabilities vanishes.
inline constexpr float kMostRowMax = 67108864.0f;  // 2^26

// row_max follows a row's maximum when a score exceeds it by more than this power of two. Until
// then probabilities reach at most 2^8 instead of 1. fp16, bf16 and the fp32 sums tolerate that,
// and accumulators need no rescale.
inline constexpr float kLazyBits = 8.0f;

__device__ __forceinline__ float row_max_of(float top, float scale_log2) {
  return __fmul_ru(top, scale_log2);
}

// How much a score exceeds the row max, as a power of two.
__device__ __forceinline__ float excess(float score, float scale_log2, float row_max) {
  return fmaf(score, scale_log2, -row_max);
}

__device__ __forceinline__ float probability(float score, float scale_log2, float row_max) {
  return numeric::exp2_approx(excess(score, scale_log2, row_max));
}

// Raises row_max to a row's highest score `top` if that has outgrown it, and rescales its sum.
// Returns the factor of its accumulators: 1 if row_max stays.
__device__ __forceinline__ float rescale_row(float top, float scale_log2, float& row_max,
                                             float& sum) {
  const float new_max = row_max_of(top, scale_log2);
  const bool grows = excess(top, scale_log2, row_max) > kLazyBits;
  const float factor = grows ? numeric::exp2_approx(row_max - new_max) : 1.0f;
  row_max = grows ? new_max : row_max;
  sum *= factor;
  return factor;
}

// The same for any `top`: a NaN makes row_max NaN, and with it the whole row.
__device__ __forceinline__ float rescale_row_nan(float top, float scale_log2, float& row_max,
                                                 float& sum) {
  const bool stays = excess(top, scale_log2, row_max) <= kLazyBits;
  const float new_max = stays ? row_max : row_max_of(top, scale_log2);
  const float factor = numeric::exp2_approx(row_max - new_max);
  row_max = new_max;
  sum *= factor;
  return factor;
}

// The maximum and the sum over the four neighbouring lanes that hold a row of a fragment of
// products.
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
// NaN score is not such a loss.
__device__ __forceinline__ bool is_rounded_away(float row_max, float sum) {
  return fabsf(row_max) > kMostRowMax && sum == sum;
}

// The result of a row after its last key.
struct RowEnd {
  float lse;
  float factor;       // of its accumulators
  bool rounded_away;  // the row needs the fallback; `factor` is infinite, which marks the row
};

// How quotients and logarithms are computed.
enum class RowEndBy { kExact, kApprox };

// Part of a row's probabilities: the maximum that they are relative to, and their sum.
struct RowState {
  float row_max;
  float sum;
};

// The sink of a query head, in natural units; -inf without sinks.
template <class Element>
__device__ __forceinline__ float sink_of(const ScoreOptions& options, int head) {
  if (options.sinks == nullptr) return -INFINITY;
  const int64_t at = head * options.sink_stride;
  if (options.sinks_are_fp32 != 0) return static_cast<const float*>(options.sinks)[at];
  return numeric::ElementTraits<Element>::to_float(static_cast<const uint16_t*>(options.sinks)[at]);
}

// A sink counts as 2^kSinkBits: scores may lie below it by that power before their probabilities
// become small numbers, which fp16 rounds.
inline constexpr int kSinkBits = 16;

// A sink is a score without a value. Its state is what a row begins with, or what is added at its
// end. The state is finite: the row of a sink beyond kMostRowMax needs the fallback.
__device__ __forceinline__ RowState state_of_sink(float sink) {
  if (sink == -INFINITY) return {kNoRowMax, 0.0f};
  const float power = sink * kLog2E;
  const float finite = power > -kNoRowMax ? -kNoRowMax : power < kNoRowMax ? kNoRowMax : power;
  return {finite - kSinkBits, static_cast<float>(1 << kSinkBits)};
}

// Ends a row whose state already includes its sink. A row with only -inf scores and no sink gives 0
// / 0 = NaN. A row that sees no key has its sink as lse, and 0 as output by definition. `factor`
// scales the accumulators to the state's maximum.
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

// Adds the sink of a query head to its row's state and ends the row.
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

// Ends a row whose maximum `top` is a score, of any size. Its `factor` is never infinite.
template <class Element>
__device__ __forceinline__ RowEnd end_row_of_scores(const ScoreOptions& options, int head,
                                                    bool sees_keys, float top, float sum) {
  const float sink = sink_of<Element>(options, head);
  if (!sees_keys) return {sink, 0.0f, false};
  const float excess = fmaf(-top, options.scale_log2, sink * kLog2E);
  const float power = numeric::exp2_approx(-fabsf(excess));
  // The larger of the two is the reference of the other.
  const bool of_sink = excess > 0.0f;
  const float total = of_sink ? fmaf(sum, power, 1.0f) : sum + power;
  const float log_max = of_sink ? sink : top * (options.scale_log2 * kLn2);
  return {fmaf(log2f(total), kLn2, log_max), (of_sink ? power : 1.0f) / total, false};
}

}  // namespace flashmoe
