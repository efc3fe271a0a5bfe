// The softmax statistics of a consumer thread: the maxima and sums of its two rows.
#pragma once

#include "cuda/tile/row_statistics.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90 {

// The most that one lane's probabilities of a row in a step may add up to under an earlier maximum.
// If they add up to more, one of them may be beyond what fp16 holds.
inline constexpr float kMostOfAStep = 16384.0f;

// A lane's two rows are lane / 4 and the row eight further on.
struct Statistics : RowStatistics<2> {
  // One of the four lanes of a row counts the sum that the row begins with.
  __device__ __forceinline__ void reset(const RowState& begin) {
    RowStatistics<2>::reset({begin.row_max, lane_index() % 4 == 0 ? begin.sum : 0.0f});
  }

  // Turns scores into probabilities and writes their sums to `step`.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float scale_log2,
                                               float (&step)[2]) const {
    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = (i / 2) % 2;
      scores[i] = probability(scores[i], scale_log2, row_max[half]);
      sums[half][i % 2] += scores[i];
    }
    step[0] = sums[0][0] + sums[0][1];
    step[1] = sums[1][0] + sums[1][1];
  }

  __device__ __forceinline__ void add(const float (&step)[2]) {
    sum[0] += step[0];
    sum[1] += step[1];
  }

  // Tells whether the maxima are too low for probabilities with these sums. A row whose maximum is
  // NaN stays as it is.
  __device__ __forceinline__ bool outgrown(const float (&step)[2]) const {
    return (!(step[0] <= kMostOfAStep) && row_max[0] == row_max[0]) ||
           (!(step[1] <= kMostOfAStep) && row_max[1] == row_max[1]);
  }
};

}  // namespace flashmoe::sm90
