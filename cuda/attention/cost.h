// What a call would take by kernels with tiles of many rows: estimates, by which families choose
// among their kernels and whether to take a call that names none.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/attention.h"
#include "cuda/runtime.h"

namespace flashmoe {

// A call, as far as its time depends on it.
struct Work {
  double heads_kv;  // batch times KV heads
  double heads_q;   // batch times query heads
  double seq_q;
  double rows;       // packed rows of a KV head
  double keys;       // that a row sees on average
  double most_keys;  // of any row
  double dims;       // dim + dim_v
  double seq_k;
};

Work work_of(const AttentionProblem& problem);

// Times in microseconds, rates per microsecond, of one multiprocessor where not said otherwise. On
// compute capability 9.0 they are fitted to measurements on an H200
// (docs/kernels/attention_short.md and attention_sm90.md), on others they are estimates.
inline constexpr double kMemoryShare = 0.88;  // of the memory's peak
inline constexpr double kUnhidden = 0.1;      // of what goes on beside something longer

inline constexpr int64_t kRowsPerGroup = 64;  // of a warpgroup

inline double ceil_of(double a, double b) {
  return static_cast<double>((static_cast<int64_t>(a) + static_cast<int64_t>(b) - 1) /
                             static_cast<int64_t>(b));
}

inline double memory_microseconds(const Work& work, const DeviceFacts& facts,
                                  double share = kMemoryShare) {
  if (facts.memory_bytes_per_microsecond <= 0) return 0;
  // All rows together see a little more than the one that sees most.
  return work.heads_kv * std::min(work.most_keys + work.seq_q, work.seq_k) * work.dims * 2 /
         (facts.memory_bytes_per_microsecond * share);
}

// What a multiprocessor does in a microsecond with the tensor cores: the short kernels, and those
// with tiles of many rows, whose start takes longer.
struct Products {
  double short_rate;
  double tile_rate;
  double tile_start;
  double tile_rows;
};

// What a step of a tile takes where only some of its groups of rows exist, of what it takes with
// all: softmax and products of one run one after the other.
inline double share_of_step(double groups, double all) {
  constexpr double kOfAny = 0.5;
  return kOfAny + (1 - kOfAny) * groups / all;
}

// What a step takes where not all multiprocessors have a tile, of what it takes where all do: it
// takes less, presumably since they share the power, and with it the clock.
inline double share_of_clock(double tiles, const DeviceFacts& facts) {
  constexpr double kOfPower = 0.09;
  return 1 - kOfPower * (1 - std::min(1.0, tiles / facts.multiprocessors));
}

inline Products products(const DeviceFacts& facts, int dim) {
  if (facts.compute_capability == 90) {
    if (dim <= 64) return {1.5e6, 4.85e6, 3.6, 192.0};
    return {1.5e6, 6.3e6, 4.2, 128.0};
  }
  return {0.7e6, 1.2e6, 3.0, 128.0};
}

// Tiles of many rows of one query head: where there are several, rows that are not there cost as
// much.
inline double tile_microseconds(const Work& work, const Products& speed, const DeviceFacts& facts) {
  const double tiles = work.heads_q * ceil_of(work.seq_q, speed.tile_rows);
  const double waves = ceil_of(tiles, facts.multiprocessors);
  const double keys = waves > 1 ? work.keys : work.most_keys;
  double run = waves * speed.tile_rows * keys * work.dims * 2 / speed.tile_rate;
  if (facts.compute_capability == 90) {
    run *= share_of_clock(tiles, facts);
    if (work.seq_q < speed.tile_rows) {
      run *= share_of_step(ceil_of(work.seq_q, kRowsPerGroup), speed.tile_rows / kRowsPerGroup);
    }
  }
  const double memory = memory_microseconds(work, facts);
  return speed.tile_start + std::max(run, memory) + kUnhidden * std::min(run, memory);
}

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
// By how much they have to be faster than one launch of another family: a second one costs the
// host, too.
inline constexpr double kSplitDoubt = 1.1;

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
                        const Products& speed, const DeviceFacts& facts);

// The best tiles as well, of at most so many groups. Of fewer only whole ones are considered.
struct TileSplit {
  int64_t most_groups;  // of a tile, for packed_tiles
  KeySplit split;
};
TileSplit best_tile_split(const AttentionProblem& problem, const Work& work, int64_t most_groups,
                          const SplitKernel& kernel, const Products& speed,
                          const DeviceFacts& facts);

// The least of what the families with tiles of many rows take, as far as this build has them, to be
// compared with one launch of another.
double many_rows_microseconds(const AttentionProblem& problem, const Work& work,
                              const Products& speed, const DeviceFacts& facts);

}  // namespace flashmoe
