// Time of a call with the few-row kernels. plan() also chooses the split of the keys by this
// estimate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm89_few_rows/params.h"

namespace flashmoe::sm89_few_rows {

// A split of a call: the rows of a tile, and the blocks that share it.
struct Split {
  int rows;
  int step_keys;
  int warps;
  int cluster;
  int resident;  // clusters that can run at a time
  int parts;  // parts of a tile, each of a cluster, that go through the workspace; 1: the tile is
              // not split so
  int part_bytes;  // in the workspace
  int dims;        // dimensions that the kernel is compiled for
};

// Times are in microseconds. Rates are per microsecond and multiprocessor, of bytes that reach its
// registers. The first three constants are fitted to measurements on an H200
// (docs/kernels/attention_sm89_few_rows.md); the others are estimates.
inline constexpr double kStart = 1.95;       // launch and first loads
inline constexpr double kEnd = 1.1;          // writing the output, which the warps of a block share
inline constexpr double kExchange = 0.5;     // per doubling of a cluster
inline constexpr double kSecond = 2.4;       // a second kernel
inline constexpr double kPartRate = 3e6;     // bytes of parts, written and read, per device
inline constexpr double kStep = 1.0;         // a step of a warp, which waits for its loads
inline constexpr double kTurn = 1.0;         // from one block to the next on a multiprocessor
inline constexpr double kManyTiles = 3.0;    // more than multiprocessors read the same keys
inline constexpr double kAloneRate = 60e3;   // bytes, when the L2 serves few others
inline constexpr double kColdRate = 44e3;    // the same for bytes that no other tile reads
inline constexpr double kSharedRate = 40e3;  // bytes, when the L2 serves all

// Factor of the memory time if rows are shorter than the kernel's: measured on an H100, for 96 in
// 128.
inline constexpr double kPaddedMemory = 1.1;

// Floating-point operations.
inline double product_rate(const DeviceFacts& facts) {
  return facts.compute_capability == 90 ? 1.5e6 : 0.7e6;
}

// Time of this family. All of its blocks read their tile's keys from the L2 to registers, at a
// shared rate, and cannot be faster than the memory.
inline double few_rows_microseconds(const Work& work, const Split& split,
                                    const DeviceFacts& facts) {
  const double whole_tiles = work.heads_kv * ceil_of(work.rows, split.rows);
  const double tiles = whole_tiles * split.parts;
  const double waves = ceil_of(tiles, split.resident);
  const double keys = waves > 1 ? work.keys : work.most_keys;  // one wave waits for the longest
  const double parts = split.warps * split.cluster * split.parts;
  const double steps = ceil_of(ceil_of(keys, split.step_keys), parts);  // per warp
  const double blocks = std::min<double>(tiles, split.resident) * split.cluster;
  const double block_keys = std::min(keys, steps * split.warps * split.step_keys);
  // If there are many clusters, their blocks share multiprocessors that can hold several.
  const bool packed = split.cluster > 1 && 2 * blocks > facts.multiprocessors;
  const double crowd = std::max(packed ? static_cast<double>(kMaxWarps) / split.warps : 1.0,
                                blocks / facts.multiprocessors);
  const double alone = work.rows <= split.rows ? kColdRate : kAloneRate;
  const double rate = std::min(alone / crowd, kSharedRate * facts.multiprocessors / blocks);
  const double load = block_keys * work.key_bytes / rate;
  const double product = block_keys * work.dims * 2 * split.rows / (product_rate(facts) / crowd);
  const bool many = whole_tiles > facts.multiprocessors && work.rows > split.rows;
  const double run = waves * std::max({load, product, steps * kStep}) * (many ? kManyTiles : 1) +
                     (waves - 1) * kTurn / crowd;
  const double memory =
      memory_microseconds(work, facts) * (split.dims > work.dims ? kPaddedMemory : 1);
  const double second = split.parts > 1 ? kSecond + 2 * tiles * split.part_bytes / kPartRate : 0;
  return kStart + kEnd / split.warps + kExchange * std::log2(split.cluster) + second +
         std::max(run, memory) + kUnhidden * std::min(run, memory);
}

}  // namespace flashmoe::sm89_few_rows
