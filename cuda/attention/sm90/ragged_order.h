// Which block takes which tile of a batch of sequences, without a prior count of the tiles: a pure
// function of their lengths. Every block evaluates it by itself, and so does the host in tests.
//
// Sequences are taken in chunks of a warp's size, and the heads of a chunk in swizzle groups, one
// after another. A group has few enough heads that blocks work on few keys at a time, which fit the
// L2, and enough heads for some rounds of tiles.
//
// The tiles of a group are sorted by the number of keys that they see, the longest first. They are
// sorted by levels of about as many keys as a tile has rows. A level holds the tiles of one
// sequence after those of another, and for each tile those of the group's heads. Blocks are dealt
// tiles in rounds of one each, and every other round runs backwards. After two rounds blocks change
// their order: otherwise the ends of levels would favour the same blocks every time. The next group
// begins with the block after the one that had the end of this group.
#pragma once

#include "cuda/tile/extents.h"

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe::sm90 {

inline constexpr int kSequencesPerChunk = kThreadsPerWarp;

// How tiles divide the levels: a level of a sequence has `groups` groups of rows, and a tile has
// `of_tile`. If both are equal, a tile is a level. If `groups` is 0, later tiles see no more keys,
// and all are on the highest level.
struct GroupsOfLevel {
  int groups;
  int of_tile;
  int most_levels;  // upper bound on the levels of a sequence's rows
};

// The tiles of one head of a sequence. Each lane has one sequence.
struct TilesOfSequence {
  int count;
  int top;  // level of the longest tile; no level is below 0

  FLASHMOE_IN_KERNEL int from_level_on(const GroupsOfLevel& by, int level) const {
    const int above = top - level + 1;
    if (above <= 0) return 0;
    if (by.groups == 0) return count;
    const int levels = above < by.most_levels ? above : by.most_levels;
    const int tiles = (levels * by.groups + by.of_tile - 1) / by.of_tile;
    return tiles < count ? tiles : count;
  }

  // `count` tiles on `levels` levels of `rows` rows each. The longest tile sees `keys` keys.
  static FLASHMOE_IN_KERNEL TilesOfSequence of(int count, int levels, int keys, int rows) {
    const int top = (keys + rows - 1) / rows;
    return {count, top < levels - 1 ? levels - 1 : top};
  }
};

// A tile of one head in a chunk.
struct TileOfChunk {
  int lane;
  int rank;  // among those of its sequence, the longest first
};

// The tile at a place in the order of a chunk's tiles of one head. `level` is an upper bound on its
// level, and is set to its level. `lanes` are the TilesOfSequence of a chunk. lanes.top() is the
// highest level, and lanes.sum(f) the sum of f(tiles) over the lanes. lanes.find(place, f, g) is
// the first lane at which the running sum of f exceeds `place`, with the rest of `place` after the
// earlier lanes, plus g(tiles).
template <class Lanes>
FLASHMOE_IN_KERNEL TileOfChunk tile_at(const Lanes& lanes, const GroupsOfLevel& by, int place,
                                       int* level) {
  const auto from = [=](int at) {
    return [=](const TilesOfSequence& tiles) { return tiles.from_level_on(by, at); };
  };
  int low = 0;
  int high = *level + 1;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (lanes.sum(from(middle)) > place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  *level = low;
  const auto above = from(low + 1);
  return lanes.find(
      place - lanes.sum(above),
      [=](const TilesOfSequence& tiles) {
        return tiles.from_level_on(by, low) - tiles.from_level_on(by, low + 1);
      },
      above);
}

// The positions of a block among the tiles of a swizzle group.
class RaggedRounds {
 public:
  // Blocks move on by this much after two rounds. Added to twice the number of blocks of a GH100,
  // 132 or 114, it gives a prime, so that a block does not meet the same heads every time.
  static constexpr int kTurn = 29;

  explicit FLASHMOE_IN_KERNEL RaggedRounds(int block) : own_slot_(block), slot_(block) {}

  // The next of `tiles` positions that are dealt to `blocks` blocks, or -1.
  FLASHMOE_IN_KERNEL int next(int tiles, int blocks) {
    while (round_ < tiles) {
      const int position = round_ + (backwards_ ? blocks - 1 - slot_ : slot_);
      round_ += blocks;
      if (backwards_) slot_ = (slot_ + kTurn) % blocks;
      backwards_ = !backwards_;
      if (position < tiles) return position;
    }
    return -1;
  }

  // Moves on to the next group, which begins with the block after the one that had the end of this
  // group's tiles.
  FLASHMOE_IN_KERNEL void pass(int tiles, int blocks) {
    own_slot_ -= tiles % blocks;
    if (own_slot_ < 0) own_slot_ += blocks;
    slot_ = own_slot_;
    round_ = 0;
    backwards_ = false;
  }

 private:
  int own_slot_;  // this block's slot in the first round of the group
  int slot_;      // slot in this round
  int round_ = 0;
  bool backwards_ = false;
};

// KV heads per swizzle group, for `heads_kv` heads with so many tiles and keys each. Groups are
// about equal, and none has more than the tiles and the keys of a group, but at least one head.
FLASHMOE_IN_KERNEL int heads_per_swizzle(int heads_kv, int tiles, int tiles_of_swizzle, int keys,
                                         int keys_of_l2) {
  const int wanted = tiles_of_swizzle / (tiles > 1 ? tiles : 1);
  const int fitting = keys_of_l2 / (keys > 1 ? keys : 1);
  const int most = wanted < fitting ? wanted : fitting;
  if (most >= heads_kv) return heads_kv;
  const int groups = most > 1 ? (heads_kv + most - 1) / most : heads_kv;
  return (heads_kv + groups - 1) / groups;
}

// The tiles of a block, chunk by chunk.
class TilesOfChunks {
 public:
  explicit FLASHMOE_IN_KERNEL TilesOfChunks(int block) : rounds_(block) {}

  // Begins a chunk of `tiles` tiles per head. Swizzle groups have `heads` heads.
  template <class Lanes>
  FLASHMOE_IN_KERNEL void begin_chunk(const Lanes& lanes, int tiles, int heads) {
    tiles_ = tiles;
    heads_ = heads;
    first_head_ = 0;
    level_ = lanes.top();
  }

  // The next tile of the chunk. Returns false when there are no more.
  template <class Lanes>
  FLASHMOE_IN_KERNEL bool next(const Lanes& lanes, const GroupsOfLevel& by, int heads_q, int blocks,
                               TileOfChunk* tile, int* head) {
    while (first_head_ < heads_q && tiles_ > 0) {
      const int heads = heads_ < heads_q - first_head_ ? heads_ : heads_q - first_head_;
      const int position = rounds_.next(tiles_ * heads, blocks);
      if (position >= 0) {
        const int place = position / heads;
        *head = first_head_ + position - place * heads;
        *tile = tile_at(lanes, by, place, &level_);
        return true;
      }
      rounds_.pass(tiles_ * heads, blocks);
      first_head_ += heads;
      level_ = lanes.top();
    }
    return false;
  }

 private:
  RaggedRounds rounds_;
  int tiles_ = 0;       // per head
  int heads_ = 0;       // per swizzle group
  int first_head_ = 0;  // of the swizzle group
  int level_ = 0;       // of the last tile
};

// All tiles, chunk by chunk and group by group, the longest of each swizzle group first. A block
// takes the next tile that no other block has.
class TilesInTurn {
 public:
  // Begins a chunk of `tiles` tiles for each of `heads_q` heads. Swizzle groups have `heads` heads.
  FLASHMOE_IN_KERNEL void begin_chunk(int tiles, int heads_q, int heads) {
    before_ += tiles_ * heads_q_;
    tiles_ = tiles;
    heads_q_ = heads_q;
    heads_ = heads;
  }

  // Whether a number is after the chunk.
  FLASHMOE_IN_KERNEL bool passes(int number) const { return number - before_ >= tiles_ * heads_q_; }

  // The tile with a number, which is in the chunk.
  template <class Lanes>
  FLASHMOE_IN_KERNEL void at(const Lanes& lanes, const GroupsOfLevel& by, int number,
                             TileOfChunk* tile, int* head) const {
    const int per_swizzle = tiles_ * heads_;
    const int first_head = (number - before_) / per_swizzle * heads_;
    const int within = (number - before_) % per_swizzle;
    const int heads = heads_ < heads_q_ - first_head ? heads_ : heads_q_ - first_head;
    const int place = within / heads;
    *head = first_head + within - place * heads;
    int level = lanes.top();
    *tile = tile_at(lanes, by, place, &level);
  }

 private:
  int before_ = 0;  // tiles of earlier chunks
  int tiles_ = 0;   // per head
  int heads_q_ = 0;
  int heads_ = 0;  // per swizzle group
};

}  // namespace flashmoe::sm90

#undef FLASHMOE_IN_KERNEL
