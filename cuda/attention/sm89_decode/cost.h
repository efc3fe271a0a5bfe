// What a call takes by the decoding kernels, an estimate: lengths are not known.
#pragma once

#include <algorithm>

#include "cuda/attention/cost.h"

namespace flashmoe::sm89_decode {

// Times are in microseconds, and rates are of one multiprocessor in a microsecond, of bytes that
// reach its registers. On an H200 the bytes come at 0.92 of the memory's peak, and both kernels
// take 7 us more where keys are many: 128 Ki keys of 8 heads took 129 us. Where keys are few they
// take up to 9 us more (benchmarks/results/attention_decode_start_h200.json).
inline constexpr double kStart = 4.5;   // launch, ranges, first loads and the last tile's end
inline constexpr double kSecond = 2.5;  // the second kernel
inline constexpr double kTile = 0.5;    // the end of a tile, of which loads hide the rest
inline constexpr double kRate = 40e3;
inline constexpr double kShareOfMemory = 0.92;
// Of tiles of 16 rows: 64 sequences of 4096 keys had 0.83, 128 of 1024 keys 0.75
// (benchmarks/results/serving_several_builds_h200.json).
inline constexpr double kShareOfMemory16 = 0.8;

// Floating-point operations.
inline double product_rate(const DeviceFacts& facts) {
  return facts.compute_capability == 90 ? 1.5e6 : 0.7e6;
}

// Tiles of so many rows, whose keys blocks divide evenly.
inline double decode_microseconds(const Work& work, int rows, const DeviceFacts& facts) {
  const double tiles = work.heads_kv * ceil_of(work.rows, rows);
  const double blocks = facts.multiprocessors;
  const double load = tiles * work.keys * work.key_bytes / (kRate * blocks);
  const double product = tiles * work.keys * work.dims * 2 * rows / (product_rate(facts) * blocks);
  const double run = std::max(load, product) + tiles * kTile / blocks;
  const double share = rows > 8 ? kShareOfMemory16 : kShareOfMemory;
  return kStart + kSecond + std::max(run, memory_microseconds(work, facts, share));
}

}  // namespace flashmoe::sm89_decode
