// Which sequences of a batch decode: those with few queries, whose rows the decoding kernels
// (sm89_decode) have. It depends on nothing else of the batch, and so may bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

inline constexpr int64_t kFewRows = 32;  // of a KV head, all its query heads counted

// Queries that such a sequence has at most.
inline int64_t few_queries(const AttentionProblem& p) {
  return std::max<int64_t>(1, kFewRows / std::max<int64_t>(p.heads_q / p.heads_kv, 1));
}

}  // namespace flashmoe
