// What a call takes by the MLA kernel, an estimate: lengths are not known.
#pragma once

#include <algorithm>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm90_mla/params.h"

namespace flashmoe::sm90_mla {

// Microseconds, and floating-point operations of one multiprocessor in one.
inline constexpr double kStart = 8;  // both launches, first loads and the last tile's end
inline constexpr double kRate = 4.2e6;
inline constexpr double kShareOfMemory = 0.9;

// A key is read once for all row tiles, in columns of k alone.
inline double mla_microseconds(const Work& work, int dims, const DeviceFacts& facts) {
  const double tiles = work.heads_kv * ceil_of(work.rows, kRows);
  const double product = tiles * work.keys * kRows * dims * 2 / (kRate * facts.multiprocessors);
  return kStart + std::max(product, memory_microseconds(work, facts, kShareOfMemory));
}

}  // namespace flashmoe::sm90_mla
