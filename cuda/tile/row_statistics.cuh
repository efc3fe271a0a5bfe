// Online softmax state of the rows whose scores a lane has: the row max and the sum of
// probabilities. Each kernel converts scores to probabilities and uses them in its own way.
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

  // Raises the row max to the highest score where scores have outgrown it. Returns false,
  // warp-uniformly, if that is so in no row. Otherwise it calls apply(r, factor) for every row,
  // with the factor of its accumulators: 1 if its maximum stays. It handles rows one after another
  // because registers are short here.
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

  // The same for all rows at once, and for any scores: a NaN score makes the row's maximum NaN, and
  // with it the whole row.
  template <class Fragments>
  __device__ __forceinline__ void rescale_nan(const typename Fragments::Scores& scores,
                                              float scale_log2, float (&factor)[kRows]) {
    constexpr int kChains = 4;  // chains of dependent maxima
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
