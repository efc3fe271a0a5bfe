// How fast the sm_90 backward kernels are. Fitted to measurements on an H200
// (docs/lab/attention_backward.md).
#pragma once

#include "cuda/attention/backward/cost.h"
#include "cuda/attention/sm90_backward/entry.h"

namespace flashmoe::sm90_backward {

inline attention_backward::Speed speed_of(const Entry& entry) {
  if (entry.dim <= 64) return {4.05e6, 3.75};
  return {4.5e6, 2.0};
}

}  // namespace flashmoe::sm90_backward
