// The order in which blocks take the items of KV heads with the same number of key tiles: how many
// heads descend, how many alternate, and in what waves they run (tile.cuh). The host decides it for
// a dense batch, the kernel that reads the tables (tables.cu) for sequences.
#pragma once

#include <cstdint>

#include "cuda/tile/extents.h"

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe::attention_backward {

struct HeadOrder {
  int32_t descending;        // heads that descend, the first ones
  int32_t descending_group;  // heads whose items alternate
  int32_t ascending_group;
  int32_t wave_tiles;  // tiles of a head that ascends which run the same way; 0: all
};

// The order depends on no property of the GPU at hand: the bits of dQ depend on it.
inline constexpr int64_t kBlocksOfLargest = 132;
inline constexpr int64_t kGroupBytes = int64_t{16} << 20;
inline constexpr int64_t kWaveTiles = 8;

struct Bounded {
  bool left;   // some query does not see the first key
  bool right;  // some query does not see the last key
};

FLASHMOE_HOST_DEVICE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
FLASHMOE_HOST_DEVICE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Heads per group if `heads` heads form as few groups as possible of at most `most` heads each.
FLASHMOE_HOST_DEVICE int32_t heads_of_group(int64_t heads, int64_t most) {
  heads = larger_of(heads, 1);
  const int64_t groups = ceil_div(heads, smaller_of(larger_of(most, 1), heads));
  return static_cast<int32_t>(ceil_div(heads, groups));
}

// Items of other heads: those of sequences of other lengths.
struct OtherItems {
  int64_t before;
  int64_t behind;
};

// A wave has one item per block: further items would begin with the next wave, and wait for this
// one. Items of a wave wait for each other at its beginning, longer with more tiles. With fewer
// tiles, sums go to and from memory more often. There are no waves if heads or tiles do not fit, or
// if there were fewer than two waves.
FLASHMOE_HOST_DEVICE void set_waves(int64_t heads, int64_t tiles_k, int64_t at_a_time,
                                    HeadOrder* order) {
  const int64_t most_idle = at_a_time / 20;
  for (int64_t least = smaller_of(kWaveTiles, tiles_k / 2); least > 0; --least) {
    const int32_t group = heads_of_group(heads, at_a_time / least);
    const int64_t tiles = at_a_time / group;
    if (2 * tiles > tiles_k || at_a_time - tiles * group > most_idle) continue;
    order->ascending_group = group;
    order->wave_tiles = static_cast<int32_t>(tiles);
    return;
  }
}

// `head_bytes`: what the items of a head read and add repeatedly. `wave_heads`: the family's items
// run in waves from so many query heads per KV head on. `at_a_time`: items that the largest GPU
// runs at a time.
FLASHMOE_HOST_DEVICE HeadOrder order_of(int64_t heads, int64_t heads_per_kv, int64_t tiles_k,
                                        int64_t head_bytes, Bounded bounded, int64_t wave_heads = 0,
                                        int64_t at_a_time = kBlocksOfLargest,
                                        OtherItems others = {0, 0}) {
  tiles_k = larger_of(tiles_k, 1);
  // Up to two items per block. Among so many heads the longest items come first.
  const int64_t filling = larger_of(2 * at_a_time / tiles_k, 1);
  HeadOrder order = {0, 1, 1, 0};
  // With several query heads inside an item, descending neighbours are too far from each other for
  // the L2. Without a bound all items begin with the same query tile in any order.
  const int64_t items = heads * tiles_k + others.before + others.behind;
  if (bounded.right && heads_per_kv == 1 && items >= 2 * filling * tiles_k) {
    const int64_t left = larger_of(filling * tiles_k - others.behind, 0);
    order.descending = static_cast<int32_t>(larger_of(heads - ceil_div(left, tiles_k), 0));
  }
  // The data of heads that alternate stays in the L2, and their items wait less for each other.
  order.descending_group = heads_of_group(order.descending, kGroupBytes / larger_of(head_bytes, 1));
  // Without a bound, items of long sequences that begin together still add to a sum one by one.
  constexpr int64_t kFewUnbounded = 8;
  order.ascending_group = heads_of_group(
      heads - order.descending, bounded.right ? filling : larger_of(filling, kFewUnbounded));
  if (bounded.right && !bounded.left && wave_heads > 0 && heads_per_kv >= wave_heads) {
    set_waves(heads, tiles_k, at_a_time, &order);
  }
  return order;
}

}  // namespace flashmoe::attention_backward

#undef FLASHMOE_HOST_DEVICE
