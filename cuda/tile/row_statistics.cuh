// Online softmax of the rows that a lane has scores of: what their probabilities are relative to,
// and their sums. How scores become probabilities, and what becomes of those, is each kernel's own.
#pragma once

#include "cuda/tile/score_fragments.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe {

template <int kRows>
struct RowStatistics {
  float sum[kRows];      // of this lane's keys
  float row_max[kRows];  // log2

  __device__ __forceinline__ void reset(const RowState& begin = {kNoRowMax, 0.0f}) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = begin.sum;
      row_max[r] = begin.row_max;
    }
  }

  // Sets row maxima that the scores have outgrown to the highest score. False, warp-uniformly, if
  // there are none; else calls apply(r, factor) for every row: what its accumulators are to be
  // multiplied by, 1 if its maximum stays. One row after another, since registers are short here.
  template <class Fragments, class Apply>
  __device__ __forceinline__ bool rescale(const typename Fragments::Scores& scores,
                                          float scale_log2, const Apply& apply) {
    float highest[kRows];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float top = fmaxf(Fragments::at(scores, r, 0), Fragments::at(scores, r, 1));
#pragma unroll
      for (int i = 2; i < Fragments::kScores; i += 2) {
        top = fmaxf(top, fmaxf(Fragments::at(scores, r, i), Fragments::at(scores, r, i + 1)));
      }
      highest[r] = top;
      outgrown = outgrown || excess(top, scale_log2, row_max[r]) > kLazyBits;
    }
    if (!__any_sync(kFullWarp, outgrown)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float top = Fragments::max_of_lanes(highest[r]);
      apply(r, rescale_row(top, scale_log2, row_max[r], sum[r]));
    }
    return true;
  }

  // The same for all rows at once, and for any scores: a NaN among them makes the row's maximum a
  // NaN, and with it the whole row.
  template <class Fragments>
  __device__ __forceinline__ void rescale_nan(const typename Fragments::Scores& scores,
                                              float scale_log2, float (&factor)[kRows]) {
    constexpr int kChains = 4;  // of dependent maxima
    float tops[kRows][kChains];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < Fragments::kScores; ++i) {
        const float score = Fragments::at(scores, r, i);
        float& top = tops[r][i % kChains];
        top = i < kChains ? score : numeric::max_nan(top, score);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float top = max_nan_of_quad(numeric::max_nan(numeric::max_nan(tops[r][0], tops[r][1]),
                                                         numeric::max_nan(tops[r][2], tops[r][3])));
      factor[r] = rescale_row_nan(top, scale_log2, row_max[r], sum[r]);
    }
  }
};

}  // namespace flashmoe
