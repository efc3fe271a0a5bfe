// Ranges of whole tiles: where each begins, as a pure function, which every block works out for
// itself, and the host in tests.
//
// The tiles of all sequences lie end to end, in units. A tile belongs to the range that would have
// its middle if all ranges were equal. So a range is longer than an equal one by no more than half
// a tile at either end.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe::sm89_decode {

// The unit at which the range of `block`, one of `blocks`, begins. The sequence that has unit
// total * block / blocks has `before` units in front of it, and tiles of `tile_units`.
FLASHMOE_HOST_DEVICE int64_t whole_begin(int64_t total, int blocks, int block, int64_t before,
                                         int tile_units) {
  const int64_t equal = total * block / blocks;
  const int64_t tile = before + (equal - before) / tile_units * tile_units;
  const bool is_before = (2 * tile + tile_units) * blocks < 2 * total * block;
  return is_before ? tile + tile_units : tile;
}

// The most units of a range for which whole tiles are better than equal ranges. Equal ranges cut
// about a tile each: two blocks then end one and begin one, and the second kernel has work.
FLASHMOE_HOST_DEVICE int64_t most_whole_units(int64_t total, int blocks, int lead) {
  const int64_t equal = (total + blocks - 1) / blocks;
  return equal + (equal + 31) / 32 + lead;
}

}  // namespace flashmoe::sm89_decode

#undef FLASHMOE_HOST_DEVICE
