// Who takes which tile of a batch of sequences, without anyone having counted them before: a pure
// function of their lengths, which every block works out for itself, and the host in tests.
//
// Sequences are taken in chunks of as many as a warp has lanes, and the heads of a chunk in swizzle
// groups, one after another: so few heads that blocks work on few keys at a time, which the L2
// holds, and so many that a group is some rounds of tiles.
//
// The tiles of a group are sorted by the keys that they see, the longest first: by levels, of about
// as many keys as a tile has rows. A level holds the tiles of one sequence after those of another,
// and of each tile those of the group's heads. Blocks are dealt these in rounds of one tile each,
// every other of which runs backwards. After two rounds they move on among each other: where the
// levels end would else be to the same blocks' advantage every time. The next group begins behind
// the block that had the end of this one.
#pragma once

#include "cuda/tile/extents.h"

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe::sm90 {

inline constexpr int kSequencesPerChunk = kThreadsPerWarp;

// What tiles hold of a level: groups of rows, of which a level of a sequence has so many. As many
// as a tile's: a tile is a level. None: later tiles see no more keys, and all are on the highest
// level.
struct GroupsOfLevel {
  int groups;
  int of_tile;
  int most_levels;  // that rows of a sequence are on
};

// The tiles of one head of a sequence, of which a lane has one.
struct TilesOfSequence {
  int count;
  int top;  // level of the longest; none is below 0

  FLASHMOE_IN_KERNEL int from_level_on(const GroupsOfLevel& by, int level) const {
    const int above = top - level + 1;
    if (above <= 0) return 0;
    if (by.groups == 0) return count;
    const int levels = above < by.most_levels ? above : by.most_levels;
    const int tiles = (levels * by.groups + by.of_tile - 1) / by.of_tile;
    return tiles < count ? tiles : count;
  }

  // Of `count` tiles on so many levels of so many rows, the longest of which sees so many keys.
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

// The tile at a place in the order of all of a chunk's, of one head. `level` is one that it is not
// above, and becomes its own. `lanes` are the TilesOfSequence of a chunk: lanes.top() is the
// highest level; lanes.sum(f) the sum of f(tiles) over them; lanes.find(place, f, g) the first lane
// at which the sum of f reaches beyond `place`, with what is left of it behind the lanes before,
// plus g(tiles).
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
  // By so much blocks move on after two rounds. With twice the number of blocks of a GH100, 132 or
  // 114, it makes a prime: so a block does not come upon the same heads every time.
  static constexpr int kTurn = 29;

  explicit FLASHMOE_IN_KERNEL RaggedRounds(int block) : own_slot_(block), slot_(block) {}

  // The next of so many positions that so many blocks are dealt, or -1.
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

  // Goes on to the group that begins behind the block which had the end of this one's tiles.
  FLASHMOE_IN_KERNEL void pass(int tiles, int blocks) {
    own_slot_ -= tiles % blocks;
    if (own_slot_ < 0) own_slot_ += blocks;
    slot_ = own_slot_;
    round_ = 0;
    backwards_ = false;
  }

 private:
  int own_slot_;  // of this block in the first round of the group
  int slot_;      // in this round
  int round_ = 0;
  bool backwards_ = false;
};

// KV heads of a swizzle group, of so many with so many tiles and keys each: about as many in each
// group, and no more than have the tiles and the keys of one, but one at least.
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

  // Goes on to a chunk of so many tiles of a head. Swizzle groups are of so many heads.
  template <class Lanes>
  FLASHMOE_IN_KERNEL void begin_chunk(const Lanes& lanes, int tiles, int heads) {
    tiles_ = tiles;
    heads_ = heads;
    first_head_ = 0;
    level_ = lanes.top();
  }

  // The next of the chunk. False when there are no more.
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
  int tiles_ = 0;       // of a head
  int heads_ = 0;       // of a swizzle group
  int first_head_ = 0;  // of the swizzle group
  int level_ = 0;       // of the last tile
};

// All tiles, chunk by chunk, where a block takes the next one that no other has: swizzle group by
// swizzle group, in each the longest first.
class TilesInTurn {
 public:
  // Goes on to a chunk of so many tiles of each of so many heads. Swizzle groups are of `heads`.
  FLASHMOE_IN_KERNEL void begin_chunk(int tiles, int heads_q, int heads) {
    before_ += tiles_ * heads_q_;
    tiles_ = tiles;
    heads_q_ = heads_q;
    heads_ = heads;
  }

  // Whether a number is behind the chunk.
  FLASHMOE_IN_KERNEL bool passes(int number) const { return number - before_ >= tiles_ * heads_q_; }

  // The tile with a number, of the chunk.
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
  int before_ = 0;  // tiles of the chunks before
  int tiles_ = 0;   // of a head
  int heads_q_ = 0;
  int heads_ = 0;  // of a swizzle group
};

}  // namespace flashmoe::sm90

#undef FLASHMOE_IN_KERNEL
