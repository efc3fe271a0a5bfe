// How fast the sm_89 backward kernels are: estimates, until they are measured.
#pragma once

#include "cuda/attention/backward/cost.h"

namespace flashmoe::sm89_backward {

// `dim` is the larger one.
inline attention_backward::Speed speed_of(int dim, const DeviceFacts& facts) {
  if (facts.compute_capability != 90) return {0.9e6, 4.0};
  if (dim <= 64) return {2.0e6, 5.0};
  if (dim <= 128) return {2.3e6, 5.0};
  return {1.7e6, 6.0};
}

}  // namespace flashmoe::sm89_backward
