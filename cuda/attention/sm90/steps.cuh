// The steps of keys that the rows of a tile need.
#pragma once

#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence.cuh"

namespace flashmoe::sm90 {

// The steps that some rows need, as a range of keys: from the first key of the first step to behind
// the last key of the last step. Both are 0 if there are no such rows, or if they see no key.
template <class Traits>
struct Steps {
  int first;  // may be below 0, where there are no keys
  int end;

  __device__ __forceinline__ Steps(int first_, int end_) : first(first_), end(end_) {}
  __device__ __forceinline__ Steps(const ScoreOptions& score, const Sequence& sequence,
                                   int first_row, int rows, int shift) {
    constexpr int kKeys = Traits::kStepKeys;
    const int last_row = min(first_row + rows, sequence.length_q) - 1;
    const int begin = sequence.first_key(score, max(first_row, 0));
    const int behind = last_row < max(first_row, 0) ? 0 : sequence.end_key(score, last_row);
    const bool any = begin < behind;
    first = any ? (begin + shift) / kKeys * kKeys - shift : 0;
    end = any ? (behind + shift + kKeys - 1) / kKeys * kKeys - shift : 0;
  }
};

}  // namespace flashmoe::sm90
