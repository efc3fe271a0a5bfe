// Time of a call with a backward kernel. Each family has its own Speed in its cost.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/backward/entry.h"
#include "cuda/attention/cost.h"

namespace flashmoe::attention_backward {

struct Speed {
  double rate;  // floating-point operations per multiprocessor and microsecond
  double item;  // microseconds of an item in addition to its steps
};

inline constexpr double kLaunches = 6.0;             // microseconds, fitted on an H200
inline constexpr double kPrologueMemoryShare = 0.7;  // of the memory's peak rate

inline double prologue_microseconds(const AttentionProblem& p, const DeviceFacts& facts) {
  if (facts.memory_bytes_per_microsecond <= 0) return 0;
  const double rows = static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seq_q);
  const auto row_bytes = static_cast<double>(2 * p.dim_v * dtype_bytes(p.q.dtype));
  return rows * row_bytes / (facts.memory_bytes_per_microsecond * kPrologueMemoryShare);
}

// A step multiplies a tile of queries with a tile of keys. Blocks share the items, but a single
// item, and so the longest one, is one block's.
inline double main_microseconds(const AttentionProblem& p, const Entry& entry, const Speed& speed,
                                const DeviceFacts& facts) {
  const Work work = work_of(p);
  const double tile_q = entry.tile_q;
  const double tile_k = entry.tile_k;
  const double tiles_q = ceil_of(work.seq_q, tile_q);
  const double tiles_k = ceil_of(work.seq_k, tile_k);
  const double step = tile_q * tile_k * 2.0 * (3 * entry.dim + 2 * entry.dim_v) /
                      (speed.rate * entry.cluster);  // microseconds
  // Each bound cuts through tiles, which are computed in full.
  const double bounds = (p.bounded_left ? 1.0 : 0.0) + (p.bounded_right ? 1.0 : 0.0);
  const double cut = bounds * (tile_q + tile_k) / 2;
  const double seen_tiles = std::min(tiles_k, (work.keys + cut) / tile_k);
  const double items = work.heads_kv * tiles_k;
  if (items == 0) return 0;
  const double all = items * speed.item + work.heads_q * tiles_q * seen_tiles * step;
  double longest_tiles = tiles_q;
  if (p.bounded_left && p.bounded_right) {
    longest_tiles = std::min(tiles_q, (work.most_keys + cut) / tile_q);
  }
  const double longest = speed.item + work.heads_q / work.heads_kv * longest_tiles * step;
  return std::max(all / std::min<double>(items, facts.multiprocessors / entry.cluster), longest);
}

inline constexpr double kTables = 5.0;  // microseconds of the kernel that reads the tables, a guess

inline double microseconds_of(const AttentionProblem& p, const Entry& entry, const Speed& speed,
                              const DeviceFacts& facts) {
  if (p.sequences.given) return kTables + microseconds_of(alike(p), entry, speed, facts);
  return kLaunches + prologue_microseconds(p, facts) + main_microseconds(p, entry, speed, facts);
}

}  // namespace flashmoe::attention_backward
