// What a call takes where keys are split over blocks, and the split that takes least. Fitted to
// measurements on an H200 (docs/kernels/attention_sm90_split_kv.md).
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/cost.h"

namespace flashmoe::sm90 {

// Tiles of the rows of all query heads of a KV head, as the sm90 kernels have them whose keys are
// split over blocks: groups of 64 rows, each some queries of some heads.
struct PackedTiles {
  int64_t packed_heads;  // query heads of a KV head in a group
  int64_t chunks;        // of so many heads, of a KV head
  int64_t queries_per_group;
  int64_t groups_per_tile;
  int64_t tiles_per_head;
  int64_t heads;  // chunks of all KV heads and batches
  int64_t tiles;
};

// Of kernels whose tiles have at most so many groups.
PackedTiles packed_tiles(const AttentionProblem& problem, int64_t most_groups);

// Times of split keys, as those above. A part begins and ends with no other of its block's beside
// it.
inline constexpr double kSplitStart = -0.6;      // beside that of tiles of one head
inline constexpr double kSplitSteps = 0.9;       // of a part, beside its own
inline constexpr double kSplitSecond = 1.8;      // a second kernel
inline constexpr double kSplitPartRate = 4.4e6;  // bytes of parts, written and read, of the device
inline constexpr double kSplitMemoryShare = 1.0;
inline constexpr double kSplitUnhidden = 0.31;
// Of stream-K, for each dimension and part that a block leaves beyond one: more than its bytes,
// presumably since blocks that begin anywhere in their tiles do not read the same keys at a time.
inline constexpr double kStreamKMoreParts = 0.05;
// By how much stream-K, of about as many steps a block as a tile has must be better: it takes a
// workspace and a second launch, and the estimates are off by as much.
inline constexpr double kStreamKDoubt = 1.03;
// By how much tiles of fewer groups must be better, that read more keys for each row.
inline constexpr double kFewerGroupsDoubt = 1.02;
// Waves of tiles beyond which stream-K is not considered: a part of one is little then.
inline constexpr double kMostStreamKWaves = 8;

// A kernel with such tiles.
struct SplitKernel {
  int step_keys;
  int part_bytes;  // of the workspace, for each part of a tile
  int dims;        // of its keys and values: padded
};

struct KeySplit {
  int64_t blocks;  // that the keys of all tiles are split over; 0: each tile is one block's
  double microseconds;
};

// The best number of blocks: by shapes and what the device is, nothing else. Either each tile is
// split over as many, or tiles are laid end to end and blocks take equal ranges of their steps:
// stream-K.
KeySplit best_key_split(const Work& work, const PackedTiles& tiles, const SplitKernel& kernel,
                        const TileSpeed& speed, const DeviceFacts& facts);

// The best tiles, of at most so many groups: tiles of fewer compete with their keys unsplit.
struct TileSplit {
  int64_t most_groups;  // of a tile, for packed_tiles
  KeySplit split;
};
TileSplit best_tile_split(const AttentionProblem& problem, const Work& work, int64_t most_groups,
                          const SplitKernel& kernel, const TileSpeed& speed,
                          const DeviceFacts& facts);

}  // namespace flashmoe::sm90
