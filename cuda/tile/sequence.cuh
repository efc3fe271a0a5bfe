// The sequence of a tile: the position of its queries and keys in the tensors, their numbers, and
// the diagonal between them. A kernel asks for it when it decodes a tile.
#pragma once

#include "cuda/tile/score_options.h"

namespace flashmoe {

struct Sequence {
  int begin_q;  // row of query 0 in the tensors
  int begin_k;  // row of key 0
  int length_q;
  int length_k;
  int diagonal;  // added to a query's index before the score options apply

  // The keys that a query sees, as in ScoreOptions.
  __device__ __forceinline__ int first_key(const ScoreOptions& options, int query) const {
    return options.first_key(query + diagonal);
  }
  __device__ __forceinline__ int end_key(const ScoreOptions& options, int query) const {
    return options.end_key(query + diagonal, length_k);
  }
  __device__ __forceinline__ KeyRange keys(const ScoreOptions& options, int query) const {
    return options.keys(query + diagonal, length_k);
  }
  __device__ __forceinline__ bool sees_keys(const ScoreOptions& options, int query) const {
    return options.sees_keys(query + diagonal, length_k);
  }

  // The same keys as rows of the tensors.
  __device__ __forceinline__ KeyRange rows_of(const KeyRange& keys) const {
    return {begin_k + keys.first, begin_k + keys.end};
  }
};

// The sequence of a row of the batch. In dense batches all are alike, and the score options include
// their diagonal.
template <class Params>
__device__ __forceinline__ Sequence sequence_of(const Params& params, int /*batch*/) {
  return {0, 0, params.seq_q, params.seq_k, 0};
}

}  // namespace flashmoe
