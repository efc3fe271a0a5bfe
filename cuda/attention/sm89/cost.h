// What a call takes by the sm89 kernels. On compute capability 9.0 the rate is what an H200 was measured
// to reach with them (docs/measurements.md), elsewhere it is an estimate.
#pragma once

#include "cuda/attention/cost.h"

namespace flashmoe::sm89 {

inline TileSpeed tile_speed(const DeviceFacts& facts) {
  if (facts.compute_capability == 90) return {3.0e6, 5.0, 128.0};
  return {1.2e6, 3.0, 128.0};
}

inline double tile_microseconds(const Work& work, const DeviceFacts& facts) {
  return flashmoe::tile_microseconds(work, tile_speed(facts), 1.0, facts);
}

}  // namespace flashmoe::sm89
