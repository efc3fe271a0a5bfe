// What a call would take, by the kernels of this family and by those with tiles of many rows: two
// estimates, by which plan() chooses a split, and whether to take a call that names no kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/attention/short/params.h"
#include "cuda/runtime.h"

namespace flashmoe::short_rows {

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

// A split of a call: tiles of so many rows, each of so many blocks.
struct Split {
  int rows;
  int step_keys;
  int warps;
  int cluster;
  int resident;    // clusters that can run at a time
  int parts;       // of a tile, each a cluster's, that go through the workspace; 1: it is one
  int part_bytes;  // of the workspace
};

// Times in microseconds, rates per microsecond of one multiprocessor, of bytes that reach its registers and
// of operations of the tensor cores. The first three, and on compute capability 9.0 the rates of tiles of
// many rows, are fitted to measurements on an H200 (docs/kernels/attention_short.md); the others, and all
// on other devices, are estimates.
inline constexpr double kStart = 1.95;      // launch and first loads
inline constexpr double kEnd = 1.1;         // writing the output, which the warps of a block share
inline constexpr double kExchange = 0.5;    // what every doubling of a cluster adds
inline constexpr double kSecond = 2.4;      // a second kernel
inline constexpr double kPartRate = 3e6;    // bytes of parts, written and read again, of the device
inline constexpr double kStep = 1.0;        // a step of a warp, which waits for its loads
inline constexpr double kTurn = 1.0;        // from one block to the next where there was one
inline constexpr double kAloneRate = 60e3;  // bytes, when the L2 serves few others
inline constexpr double kColdRate = 44e3;   // the same of bytes that no other tile reads
inline constexpr double kSharedRate = 40e3;   // bytes, when it serves all
inline constexpr double kMemoryShare = 0.88;  // of the memory's peak
inline constexpr double kUnhidden = 0.1;      // of what goes on beside something longer

inline double ceil_of(double a, double b) {
  return static_cast<double>((static_cast<int64_t>(a) + static_cast<int64_t>(b) - 1) /
                             static_cast<int64_t>(b));
}

inline double memory_microseconds(const Work& work, const DeviceFacts& facts) {
  if (facts.memory_bytes_per_microsecond <= 0) return 0;
  // All rows together see a little more than the one that sees most.
  return work.heads_kv * std::min(work.most_keys + work.seq_q, work.seq_k) * work.dims * 2 /
         (facts.memory_bytes_per_microsecond * kMemoryShare);
}

// What a multiprocessor does in a microsecond with the tensor cores: these kernels and those with
// tiles of many rows, whose start takes longer.
struct Products {
  double short_rate;
  double tile_rate;
  double tile_start;
  double tile_rows;
};

inline Products products(const DeviceFacts& facts, int dim) {
  if (facts.compute_capability == 90) {
    if (dim <= 64) return {1.5e6, 4.3e6, 3.8, 192.0};
    return {1.5e6, 6.5e6, 4.5, 128.0};
  }
  return {0.7e6, 1.2e6, 3.0, 128.0};
}

// The time of this family: its blocks all read their tile's keys from the L2 to registers, at a
// rate that they share, and cannot be faster than the memory.
inline double short_microseconds(const Work& work, const Split& split, const Products& speed,
                                 const DeviceFacts& facts) {
  const double tiles = work.heads_kv * ceil_of(work.rows, split.rows) * split.parts;
  const double waves = ceil_of(tiles, split.resident);
  const double keys = waves > 1 ? work.keys : work.most_keys;  // one wave waits for the longest
  const double parts = split.warps * split.cluster * split.parts;
  const double steps = ceil_of(ceil_of(keys, split.step_keys), parts);  // of a warp
  const double blocks = std::min<double>(tiles, split.resident) * split.cluster;
  const double block_keys = std::min(keys, steps * split.warps * split.step_keys);
  // Blocks of many clusters are put together on multiprocessors that can hold several.
  const bool packed = split.cluster > 1 && 2 * blocks > facts.multiprocessors;
  const double crowd = std::max(packed ? static_cast<double>(kMaxWarps) / split.warps : 1.0,
                                blocks / facts.multiprocessors);
  const double alone = work.rows <= split.rows ? kColdRate : kAloneRate;
  const double rate = std::min(alone / crowd, kSharedRate * facts.multiprocessors / blocks);
  const double load = block_keys * work.dims * 2 / rate;
  const double product = block_keys * work.dims * 2 * split.rows / (speed.short_rate / crowd);
  const double run = waves * std::max({load, product, steps * kStep}) + (waves - 1) * kTurn / crowd;
  const double memory = memory_microseconds(work, facts);
  const double second = split.parts > 1 ? kSecond + 2 * tiles * split.part_bytes / kPartRate : 0;
  return kStart + kEnd / split.warps + kExchange * std::log2(split.cluster) + second +
         std::max(run, memory) + kUnhidden * std::min(run, memory);
}

// The time of kernels with tiles of many rows of one query head: rows that are not there cost as
// much.
inline double tile_microseconds(const Work& work, const Products& speed, const DeviceFacts& facts) {
  const double tiles = work.heads_q * ceil_of(work.seq_q, speed.tile_rows);
  const double waves = ceil_of(tiles, facts.multiprocessors);
  const double keys = waves > 1 ? work.keys : work.most_keys;
  const double run = waves * speed.tile_rows * keys * work.dims * 2 / speed.tile_rate;
  const double memory = memory_microseconds(work, facts);
  return speed.tile_start + std::max(run, memory) + kUnhidden * std::min(run, memory);
}

}  // namespace flashmoe::short_rows
