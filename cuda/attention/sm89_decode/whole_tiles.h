// Shares of whole tiles: where each begins, as a pure function, which every block works out for
// itself, and the host in tests.
//
// The tiles of all sequences lie end to end, in units. A tile belongs to the share that would have
// its middle if all shares were equal. So a share is longer than an equal one by no more than half
// a tile at either end.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe::sm89_decode {

// The unit at which share `share` of `shares` begins. The sequence that has unit total * share /
// shares has `before` units in front of it, and tiles of `tile_units`.
FLASHMOE_HOST_DEVICE int64_t whole_begin(int64_t total, int shares, int share, int64_t before,
                                         int tile_units) {
  const int64_t equal = total * share / shares;
  const int64_t tile = before + (equal - before) / tile_units * tile_units;
  const bool is_before = (2 * tile + tile_units) * shares < 2 * total * share;
  return is_before ? tile + tile_units : tile;
}

// Units that a share may have for this to be better than equal ones. These cut about a tile each,
// by which two blocks end one and begin one, and the second kernel has work.
FLASHMOE_HOST_DEVICE int64_t most_whole_units(int64_t total, int shares, int lead) {
  const int64_t equal = (total + shares - 1) / shares;
  return equal + (equal + 31) / 32 + lead;
}

}  // namespace flashmoe::sm89_decode

#undef FLASHMOE_HOST_DEVICE
