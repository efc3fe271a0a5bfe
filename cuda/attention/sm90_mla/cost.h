// Time of a call with the MLA kernel. It is an estimate: lengths are unknown.
#pragma once

#include <algorithm>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm90_mla/params.h"

namespace flashmoe::sm90_mla {

// Microseconds, and floating-point operations per multiprocessor and microsecond.
inline constexpr double kStart = 8;  // both launches, first loads and the last tile's epilogue
inline constexpr double kRate = 4.2e6;
inline constexpr double kShareOfMemory = 0.9;

// A key is read once for all row tiles, and only the columns of k.
inline double mla_microseconds(const Work& work, int dims, const DeviceFacts& facts) {
  const double tiles = work.heads_kv * ceil_of(work.rows, kRows);
  const double product = tiles * work.keys * kRows * dims * 2 / (kRate * facts.multiprocessors);
  return kStart + std::max(product, memory_microseconds(work, facts, kShareOfMemory));
}

}  // namespace flashmoe::sm90_mla
