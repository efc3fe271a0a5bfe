// Exchanges between four lanes, so that each writes longer runs.
#pragma once

#include "cuda/tile/thread.cuh"

namespace flashmoe {

// Gives lane 4 q + t word t of lanes 4 q to 4 q + 3, in their order.
__device__ __forceinline__ void transpose_4x4(uint32_t (&words)[4], int lane) {
  const auto exchange = [&](uint32_t& first, uint32_t& second, int distance) {
    const bool upper = (lane & distance) != 0;
    const uint32_t received = __shfl_xor_sync(kFullWarp, upper ? first : second, distance);
    (upper ? first : second) = received;
  };
  exchange(words[0], words[1], 1);
  exchange(words[2], words[3], 1);
  exchange(words[0], words[2], 2);
  exchange(words[1], words[3], 2);
}

}  // namespace flashmoe
