// Cost of layers of experts and of grouped products: work that all families share, and a time from
// a family's own speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/ops/moe/problem.h"
#include "cuda/runtime.h"

namespace flashmoe::moe {

// The properties of a call that its time depends on.
struct Work {
  double weight_bytes;  // of the experts that tokens are expected to choose
  double flops;
};

// Expected number of chosen experts if tokens choose evenly.
inline double experts_taken(double tokens, double top_k, double experts) {
  return experts * (1 - std::pow(1 - std::min(1.0, top_k / experts), tokens));
}

inline Work work_of(const MoeForwardProblem& p) {
  const double matrix = static_cast<double>(p.hidden) * static_cast<double>(p.inner);
  const double ups = p.gated ? 2 : 1;
  const double taken = experts_taken(static_cast<double>(p.tokens), p.top_k, p.experts);
  const double expert_bytes = matrix * (ups * static_cast<double>(dtype_bytes(p.up.dtype)) +
                                        static_cast<double>(dtype_bytes(p.down.dtype)));
  return {taken * expert_bytes, 2 * static_cast<double>(p.tokens * p.top_k) * (ups + 1) * matrix};
}

inline Work work_of(const GroupedProductProblem& p) {
  const double matrix = static_cast<double>(p.columns) * static_cast<double>(p.out_columns);
  const double rows = static_cast<double>(p.rows) * (p.counts != nullptr ? p.experts : 1);
  const double taken = p.counts != nullptr ? p.experts : experts_taken(rows, 1, p.experts);
  return {taken * matrix * static_cast<double>(dtype_bytes(p.w.dtype)), 2 * rows * matrix};
}

// Speed of a family. Times are in microseconds.
struct Speed {
  double start;         // launches, and exposed latency of loads
  double memory_share;  // of the memory's peak rate, for weights
  double rate;          // floating-point operations per multiprocessor
};

inline double microseconds(const Work& work, const Speed& speed, const DeviceFacts& facts) {
  const double memory =
      facts.memory_bytes_per_microsecond > 0
          ? work.weight_bytes / (facts.memory_bytes_per_microsecond * speed.memory_share)
          : 0;
  return speed.start + std::max(memory, work.flops / (speed.rate * facts.multiprocessors));
}

}  // namespace flashmoe::moe
