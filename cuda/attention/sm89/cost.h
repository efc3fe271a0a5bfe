// Time of a call with the sm89 kernels. For compute capability 9.0 the rate was measured on an H100
// at 4 x 2048 tokens, d 128 (benchmarks/results/shared_tile_h100.json). For others it is an
// estimate.
#pragma once

#include "cuda/attention/cost.h"

namespace flashmoe::sm89 {

inline TileSpeed tile_speed(const DeviceFacts& facts) {
  if (facts.compute_capability == 90) return {2.4e6, 5.0, 128.0};
  return {1.2e6, 3.0, 128.0};
}

// A guess that keeps calls on Hopper's own kernels, which were faster wherever both were timed
// (compare benchmarks/results/attention_forward_sm89_h200.json with attention_forward_h200.json).
inline constexpr double kBesideHoppersOwn = 1.2;

inline double tile_microseconds(const Work& work, const DeviceFacts& facts) {
  const double microseconds = flashmoe::tile_microseconds(work, tile_speed(facts), 1.0, facts);
  return facts.compute_capability == 90 ? kBesideHoppersOwn * microseconds : microseconds;
}

}  // namespace flashmoe::sm89
