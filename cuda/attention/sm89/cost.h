// What a call takes by the sm89 kernels. On compute capability 9.0 the rate is what an H200 reached
// in causal calls of 16 x 1024 tokens (benchmarks/results/attention_forward_sm89_h200.json): causal
// calls of shorter sequences take up to a quarter longer than the estimate, and others as little as
// 0.6 of it. The share of the memory's peak is a guess, since no call that the memory bounds was
// timed. On other devices all of it is an estimate.
#pragma once

#include "cuda/attention/cost.h"

namespace flashmoe::sm89 {

inline TileSpeed tile_speed(const DeviceFacts& facts) {
  if (facts.compute_capability == 90) return {2.0e6, 6.0, 128.0, 0.7333};
  return {1.2e6, 3.0, 128.0};
}

inline double tile_microseconds(const Work& work, const DeviceFacts& facts) {
  return flashmoe::tile_microseconds(work, tile_speed(facts), 1.0, facts);
}

}  // namespace flashmoe::sm89
