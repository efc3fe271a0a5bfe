// Which tile a block takes next. Tiles have positions, from 0 on, and a position has a tile of a
// head.
//
// A block of a kernel that is not persistent takes the position of its index, or some blocks share
// one. Blocks of persistent kernels take theirs
//
// - In order: rounds of one tile for each block. Every other round runs backwards: whoever had the
//   longest tile of one has the shortest of the next.
// - L2 swizzle: rounds that begin anew with each group of so many tiles, of heads whose keys and
//   values fit the L2 together, and which come longest first. One group of all tiles is in order.
// - Stream-K: the steps of all tiles, laid end to end, in one range for each block. The host has
//   found where these begin.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"

namespace flashmoe {

// What is at a position.
struct TileOfHead {
  int head;  // of those of all batches
  int rank;  // of the tile among those of the head
};

// The tile of a rank: longest_tiles_first says that the last ones are the longest, and come first.
template <class Params>
__device__ __forceinline__ int tile_of_rank(const Params& params, int rank) {
  return params.longest_tiles_first ? params.tiles_per_head - 1 - rank : rank;
}

// Head by head.
__device__ __forceinline__ TileOfHead tile_in_order(const Divisor& by_tiles_per_head,
                                                    int tiles_per_head, int position) {
  const int head = by_tiles_per_head.quotient(position);
  return {head, position - head * tiles_per_head};
}

// L2 swizzle: groups of heads_per_swizzle of the heads, the last of which may hold fewer, and in a
// group the first tiles of its heads, the second ones, and so on.
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
  // Calls take(position) for the next tile. `params` has tiles_per_head of `heads`, and where
  // longest_tiles_first the groups: tiles of one, and these modulo the number of blocks. False when
  // there are no more.
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
      // Behind the block that had this one's end: groups may hold fewer tiles than there are
      // blocks.
      slot_ -= params.slots_per_swizzle;
      if (slot_ < 0) slot_ += blocks;
    }
    return false;
  }

 private:
  int slot_ = static_cast<int>(blockIdx.x);  // of this block in a round of the group
  int first_ = 0;                            // position of the group
  int round_ = 0;                            // position of the round
  bool forwards_ = true;
};

class StreamK {
 public:
  // `start` says where the block's range begins: `tile`, and `step` of it. Without, tiles come
  // whole.
  template <class Start>
  __device__ __forceinline__ void begin(const Start& start) {
    next_ = start.tile;
    first_step_ = start.step;
  }

  // Calls take(position, first_step, cut) for the next tile of the range, which ends where the next
  // block's begins. A block before has the steps before first_step, and of a tile that is cut the
  // next block has those from its own start on. False when there are no more.
  template <class Start, class Take>
  __device__ __forceinline__ bool next_of_range(const Start& end, const Take& take) {
    const bool cut = next_ == end.tile;
    if (next_ > end.tile || (cut && first_step_ >= end.step)) return false;
    take(next_, first_step_, cut);
    ++next_;
    first_step_ = 0;
    return true;
  }

  // Calls take(position) for the next of so many whole tiles, in rounds. False when there are no
  // more.
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
