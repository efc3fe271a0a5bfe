// Speed of the sm_90 backward kernels. Fitted to measurements on an H200
// (docs/lab/attention_backward.md).
#pragma once

#include "cuda/attention/backward/cost.h"
#include "cuda/attention/sm90_backward/entry.h"

namespace flashmoe::sm90_backward {

using attention_backward::Speed;

inline Speed speed_of(const Entry& entry) {
  if (entry.dim <= 64) return {4.05e6, 3.75};
  if (entry.dim <= 128) return {4.5e6, 2.0};
  if (entry.dim_v <= 128) return {4.0e6, 3.0};
  return entry.dim <= 192 ? Speed{2.8e6, 5.75} : Speed{4.4e6, 7.75};
}

}  // namespace flashmoe::sm90_backward
