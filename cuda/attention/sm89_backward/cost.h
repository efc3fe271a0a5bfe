// Speed of the sm_89 backward kernels. On Hopper it is fitted to measurements
// (docs/lab/attention_backward_sm89.md), elsewhere it is an estimate.
#pragma once

#include <algorithm>

#include "cuda/attention/backward/cost.h"
#include "cuda/attention/sm89_backward/entry.h"

namespace flashmoe::sm89_backward {

inline attention_backward::Speed speed_of(const Entry& entry, const DeviceFacts& facts) {
  const int dim = std::max(entry.dim, entry.dim_v);
  if (facts.compute_capability != 90) return {0.9e6, 4.0};
  if (dim <= 64) return {2.03e6, 4.0};
  if (dim <= 128) return {2.25e6, 8.5};
  return {1.88e6, 10.0};
}

}  // namespace flashmoe::sm89_backward
