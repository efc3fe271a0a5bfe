// What a call takes by the sm89 kernels. On compute capability 9.0 the rate is what an H100 was measured
// to reach with them (docs/lab/attention_short.md), elsewhere it is an estimate.
#pragma once

#include "cuda/attention/cost.h"

namespace flashmoe::sm89 {

inline TileSpeed tile_speed(const DeviceFacts& facts) {
  if (facts.compute_capability == 90) return {2.4e6, 5.0, 128.0};
  return {1.2e6, 3.0, 128.0};
}

// Where Hopper's own kernels serve a call, too, these were never the faster ones.
inline constexpr double kBesideHoppersOwn = 1.2;

inline double tile_microseconds(const Work& work, const DeviceFacts& facts) {
  const double microseconds = flashmoe::tile_microseconds(work, tile_speed(facts), 1.0, facts);
  return facts.compute_capability == 90 ? kBesideHoppersOwn * microseconds : microseconds;
}

}  // namespace flashmoe::sm89
