// Time of a call whose keys are split over blocks, and the fastest split. Fitted to measurements on
// an H200 (docs/kernels/attention_sm90_split_kv.md).
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/cost.h"

namespace flashmoe::sm90 {

// Tiles of the rows of all query heads of a KV head, for the sm90 kernels whose keys are split over
// blocks. A tile has groups of 64 rows, each some queries of some heads.
struct PackedTiles {
  int64_t packed_heads;  // query heads of a KV head in a group
  int64_t chunks;        // of packed_heads heads, per KV head
  int64_t queries_per_group;
  int64_t groups_per_tile;
  int64_t tiles_per_head;
  int64_t heads;  // chunks of all KV heads and batches
  int64_t tiles;
};

// Tiles of kernels with at most `most_groups` groups per tile.
PackedTiles packed_tiles(const AttentionProblem& problem, int64_t most_groups);

// Constants for split keys. Nothing overlaps the beginning and the end of a part, as a block has
// only one.
inline constexpr double kSplitStart = -0.6;      // in addition to that of tiles of one head
inline constexpr double kSplitSteps = 0.9;       // per part, in addition to its own steps
inline constexpr double kSplitSecond = 1.8;      // a second kernel
inline constexpr double kSplitPartRate = 4.4e6;  // bytes of parts, written and read, per device
inline constexpr double kSplitMemoryShare = 1.0;
inline constexpr double kSplitUnhidden = 0.31;
// Stream-K: cost per dimension and per part that a block leaves beyond one. It is more than its
// bytes explain, presumably because blocks that begin anywhere in their tiles do not read the same
// keys at the same time.
inline constexpr double kStreamKMoreParts = 0.05;
// Factor by which stream-K, with about as many steps per block as a tile has, must be better. It
// takes a workspace and a second launch, and the estimates are off by as much.
inline constexpr double kStreamKDoubt = 1.03;
// Factor by which tiles of fewer groups must be better; they read more keys per row.
inline constexpr double kFewerGroupsDoubt = 1.02;
// Waves of tiles beyond which stream-K is not considered: then a part of one wave hardly matters.
inline constexpr double kMostStreamKWaves = 8;

// A kernel with such tiles.
struct SplitKernel {
  int step_keys;
  int part_bytes;  // in the workspace, per part of a tile
  int dims;        // of its keys and values, padded
};

struct KeySplit {
  int64_t blocks;  // blocks over which the keys of all tiles are split; 0: each tile has one block
  double microseconds;
};

// The best number of blocks, from shapes and properties of the device alone. Either each tile is
// split over equally many blocks, or tiles are laid end to end and blocks take equal ranges of
// their steps (stream-K).
KeySplit best_key_split(const Work& work, const PackedTiles& tiles, const SplitKernel& kernel,
                        const TileSpeed& speed, const DeviceFacts& facts);

// The best tiles of at most `most_groups` groups. Tiles with fewer groups compete without split
// keys.
struct TileSplit {
  int64_t most_groups;  // per tile, for packed_tiles
  KeySplit split;
};
TileSplit best_tile_split(const AttentionProblem& problem, const Work& work, int64_t most_groups,
                          const SplitKernel& kernel, const TileSpeed& speed,
                          const DeviceFacts& facts);

}  // namespace flashmoe::sm90
