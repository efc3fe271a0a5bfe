// Where a lane has the scores of its rows: one layout per way of computing the products. A lane's
// row r is row_of(r) rows below its first row. Score i of a row is of the key key_of(i) behind the
// lane's first key.
#pragma once

#include <cmath>

#include "cuda/tile/softmax.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe {

// S = Q K^T by mma.sync m16n8k16: the first row is lane / 4, the first key 2 (lane % 4).
template <int kRowAtoms, int kKeys>
struct ScoreFragments {
  using Scores = float[kRowAtoms][kKeys / 8][4];
  static constexpr int kRows = 2 * kRowAtoms;
  static constexpr int kScores = kKeys / 4;  // per row

  template <class Array>
  static __device__ __forceinline__ auto& at(Array& scores, int r, int i) {
    return scores[r / 2][i / 2][r % 2 * 2 + i % 2];
  }
  static constexpr __device__ __forceinline__ int row_of(int r) { return 8 * r; }
  static constexpr __device__ __forceinline__ int key_of(int i) { return 8 * (i / 2) + i % 2; }
  static __device__ __forceinline__ float max_of_lanes(float top) { return max_of_quad(top); }
};

// Its transpose K Q^T: the first row is 2 (lane % 4), the first key lane / 4.
template <int kRowBlocks, int kKeyBlocks>
struct TransposedScoreFragments {
  using Scores = float[kKeyBlocks][kRowBlocks][4];
  static constexpr int kRows = 2 * kRowBlocks;
  static constexpr int kScores = 2 * kKeyBlocks;

  template <class Array>
  static __device__ __forceinline__ auto& at(Array& scores, int r, int i) {
    return scores[i / 2][r / 2][i % 2 * 2 + r % 2];
  }
  static constexpr __device__ __forceinline__ int row_of(int r) { return 8 * (r / 2) + r % 2; }
  static constexpr __device__ __forceinline__ int key_of(int i) { return 8 * i; }
  static __device__ __forceinline__ float max_of_lanes(float top) {
#pragma unroll
    for (int mask = 4; mask < kThreadsPerWarp; mask *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, mask));
    }
    return top;
  }
};

// S = Q K^T by wgmma, of a warp's 16 rows: the first row is lane / 4, the first key 2 (lane % 4).
template <int kKeys>
struct GroupScoreFragments {
  using Scores = float[kKeys / 2];
  static constexpr int kRows = 2;
  static constexpr int kScores = kKeys / 4;

  template <class Array>
  static __device__ __forceinline__ auto& at(Array& scores, int r, int i) {
    return scores[i / 2 * 4 + 2 * r + i % 2];
  }
};

// Masks the keys that a row does not see. row(r) returns a function sees(i) for row r.
template <class Fragments, class Row>
__device__ __forceinline__ void mask_scores(typename Fragments::Scores& scores, const Row& row) {
#pragma unroll
  for (int r = 0; r < Fragments::kRows; ++r) {
    const auto sees = row(r);
#pragma unroll
    for (int i = 0; i < Fragments::kScores; ++i) {
      if (!sees(i)) Fragments::at(scores, r, i) = -INFINITY;
    }
  }
}

}  // namespace flashmoe
