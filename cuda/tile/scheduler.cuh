// Which tile a block takes next. Tiles have positions, from 0 on. A position maps to a tile of a
// head.
//
// A block of a kernel that is not persistent takes the position of its index, or several blocks
// share one. Blocks of persistent kernels take positions by one of these schedules:
//
// - In order: rounds of one tile per block. Every other round runs backwards: a block with the
//   longest tile of one round has the shortest of the next.
// - L2 swizzle: rounds start again with each group of tiles. The keys and values of a group's heads
//   fit the L2 together, and its longest tiles come first. A single group of all tiles is in order.
// - Stream-K: the steps of all tiles, laid end to end, are cut into one range per block. The host
//   computes where ranges begin.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"

namespace flashmoe {

// The tile at a position.
struct TileOfHead {
  int head;  // counted over all batches
  int rank;  // of the tile among those of the head
};

// The tile of a rank. longest_tiles_first: the last tiles are the longest and come first.
template <class Params>
__device__ __forceinline__ int tile_of_rank(const Params& params, int rank) {
  return params.longest_tiles_first ? params.tiles_per_head - 1 - rank : rank;
}

// Tiles in order, head by head.
__device__ __forceinline__ TileOfHead tile_in_order(const Divisor& by_tiles_per_head,
                                                    int tiles_per_head, int position) {
  const int head = by_tiles_per_head.quotient(position);
  return {head, position - head * tiles_per_head};
}

// L2 swizzle: each group has heads_per_swizzle heads, the last group maybe fewer. Within a group,
// the first tiles of all heads come first, then the second ones, and so on.
template <class Params>
__device__ __forceinline__ TileOfHead tile_in_swizzle(const Params& params, int position) {
  const int swizzle = params.by_tiles_per_swizzle.quotient(position);
  const int place = position - swizzle * params.by_tiles_per_swizzle.number();
  const int first_head = swizzle * params.heads_per_swizzle;
  const bool last = params.heads - first_head <= params.heads_per_swizzle;
  const Divisor& heads = last ? params.by_heads_of_last_swizzle : params.by_heads_per_swizzle;
  const int rank = heads.quotient(place);
  return {first_head + place - rank * heads.number(), rank};
}

class SwizzledRounds {
 public:
  // Calls take(position) for the next tile. Returns false when there are no more. `params` has
  // tiles_per_head, `heads` and, with longest_tiles_first, the groups: tiles per group, and that
  // number modulo the number of blocks.
  template <class Params, class Take>
  __device__ __forceinline__ bool next(const Params& params, const Take& take) {
    const int blocks = static_cast<int>(gridDim.x);
    const int tiles = params.tiles_per_head * params.heads;
    const int swizzle = params.longest_tiles_first ? params.by_tiles_per_swizzle.number() : tiles;
    while (first_ < tiles) {
      const int end = min(first_ + swizzle, tiles);
      while (round_ < end) {
        const int position = round_ + (forwards_ ? slot_ : blocks - 1 - slot_);
        round_ += blocks;
        forwards_ = !forwards_;
        if (position < end) {
          take(position);
          return true;
        }
      }
      first_ += swizzle;
      round_ = first_;
      forwards_ = true;
      // Follows the block that had the end of this group: groups may have fewer tiles than there
      // are blocks.
      slot_ -= params.slots_per_swizzle;
      if (slot_ < 0) slot_ += blocks;
    }
    return false;
  }

 private:
  int slot_ = static_cast<int>(blockIdx.x);  // this block's slot in a round of the group
  int first_ = 0;                            // position of the group
  int round_ = 0;                            // position of the round
  bool forwards_ = true;
};

class StreamK {
 public:
  // `start` says where the block's range begins: `tile`, and `step` in it. Without a start, tiles
  // are whole.
  template <class Start>
  __device__ __forceinline__ void begin(const Start& start) {
    next_ = start.tile;
    first_step_ = start.step;
  }

  // Calls take(position, first_step, cut) for the next tile of the range, which ends where the next
  // block's range begins. Returns false when there are no more. An earlier block has the steps
  // before first_step. If a tile is cut, the next block has the steps from its own start on.
  template <class Start, class Take>
  __device__ __forceinline__ bool next_of_range(const Start& end, const Take& take) {
    const bool cut = next_ == end.tile;
    if (next_ > end.tile || (cut && first_step_ >= end.step)) return false;
    take(next_, first_step_, cut);
    ++next_;
    first_step_ = 0;
    return true;
  }

  // Calls take(position) for the next of `tiles` whole tiles, in rounds. Returns false when there
  // are no more.
  template <class Take>
  __device__ __forceinline__ bool next_of_rounds(int tiles, const Take& take) {
    const int blocks = static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x);
    const int position = next_ + (forwards_ ? block : blocks - 1 - block);
    if (position >= tiles) return false;
    next_ += blocks;
    forwards_ = !forwards_;
    take(position);
    return true;
  }

 private:
  int next_ = 0;  // tile of the range, or position of the round
  int first_step_ = 0;
  bool forwards_ = true;
};

}  // namespace flashmoe
