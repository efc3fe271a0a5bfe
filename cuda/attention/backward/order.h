// In which order blocks take the items of KV heads that have as many tiles of keys: how many of the
// heads descend, how many alternate, and in what waves they run (tile.cuh). Of a dense batch the
// host decides, of sequences the kernel that reads their tables (tables.cuh).
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
  int32_t descending;        // the first so many heads descend
  int32_t descending_group;  // heads whose items alternate
  int32_t ascending_group;
  int32_t wave_tiles;  // of a head that ascends: so many run the same way; 0: all
};

// No count of the GPU at hand is in the order: the bits of dQ depend on it.
inline constexpr int64_t kBlocksOfLargest = 132;
inline constexpr int64_t kGroupBytes = int64_t{16} << 20;
inline constexpr int64_t kWaveTiles = 8;

struct Bounded {
  bool left;   // some query does not see the first key
  bool right;  // some query does not see the last key
};

FLASHMOE_HOST_DEVICE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
FLASHMOE_HOST_DEVICE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Of so many heads as few groups as have at most `most` each: how many heads these then have.
FLASHMOE_HOST_DEVICE int32_t heads_of_group(int64_t heads, int64_t most) {
  heads = larger_of(heads, 1);
  const int64_t groups = ceil_div(heads, smaller_of(larger_of(most, 1), heads));
  return static_cast<int32_t>(ceil_div(heads, groups));
}

// Items of other heads than these: of sequences of other lengths.
struct OtherItems {
  int64_t before;
  int64_t behind;
};

// A wave has an item for each block: others would begin with the next wave, and wait for this one.
// Its items wait for each other at its beginning, which takes the longer the more tiles it has;
// with few tiles sums come and go to memory the more often. Where heads or tiles do not suit, or of
// less than two waves, there are none.
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

// `head_bytes` is what the items of a head read and add again and again, `wave_heads` with how many
// query heads to a KV head the family's items run in waves, `at_a_time` how many items the largest
// GPU runs.
FLASHMOE_HOST_DEVICE HeadOrder order_of(int64_t heads, int64_t heads_per_kv, int64_t tiles_k,
                                        int64_t head_bytes, Bounded bounded, int64_t wave_heads = 0,
                                        int64_t at_a_time = kBlocksOfLargest,
                                        OtherItems others = {0, 0}) {
  tiles_k = larger_of(tiles_k, 1);
  // Up to two items for each block: the longest ones come first among so many heads.
  const int64_t filling = larger_of(2 * at_a_time / tiles_k, 1);
  HeadOrder order = {0, 1, 1, 0};
  // With query heads inside an item, neighbours that descend are too far from each other for the
  // L2. Without a bound all items begin with the same query tile, whatever the order.
  const int64_t items = heads * tiles_k + others.before + others.behind;
  if (bounded.right && heads_per_kv == 1 && items >= 2 * filling * tiles_k) {
    const int64_t left = larger_of(filling * tiles_k - others.behind, 0);
    order.descending = static_cast<int32_t>(larger_of(heads - ceil_div(left, tiles_k), 0));
  }
  // What heads that alternate use stays in the L2, and their items wait for each other less.
  order.descending_group = heads_of_group(order.descending, kGroupBytes / larger_of(head_bytes, 1));
  // Without a bound, items of long sequences that begin together still come one by one to a sum.
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
