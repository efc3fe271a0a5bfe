// Which sequences of a batch decode: those with few queries, which the decoding kernels
// (sm89_decode) compute. This depends on nothing else in the batch, so neither do the bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

inline constexpr int64_t kFewRows = 32;  // per KV head, over all its query heads

// The most queries of such a sequence.
inline int64_t few_queries(const AttentionProblem& p) {
  return std::max<int64_t>(1, kFewRows / std::max<int64_t>(p.heads_q / p.heads_kv, 1));
}

}  // namespace flashmoe
