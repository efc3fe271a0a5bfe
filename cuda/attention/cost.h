// Shared parts of the families' estimates of a call's time. Each family has its own constants, in
// its cost.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/ops/attention/problem.h"
#include "cuda/runtime.h"

namespace flashmoe {

// The properties of a call that its time depends on.
struct Work {
  double heads_kv;  // batch times KV heads
  double heads_q;   // batch times query heads
  double seq_q;
  double rows;       // packed rows per KV head
  double keys;       // keys that a row sees on average
  double most_keys;  // most keys that a row sees
  double dims;       // dim + dim_v
  double key_bytes;  // bytes of a key and its value
  double seq_k;
};

// Bytes of a key and its value.
inline int64_t key_bytes(const AttentionProblem& p) {
  return p.dim * dtype_bytes(p.k.dtype) + p.dim_v * dtype_bytes(p.v.dtype);
}

// A dense problem that stands for a ragged, padded or paged batch, whose lengths are unknown. It
// has as many sequences, with as many queries and keys each as the rows of the tensors allow.
AttentionProblem alike(const AttentionProblem& problem);

// Ragged, padded and paged batches count as if all sequences were alike.
Work work_of(const AttentionProblem& problem);

// The same if the queries of `heads` heads, one each, are the rows of a tile.
inline Work with_packed_heads(Work work, int64_t heads) {
  if (heads > 1) {
    work.heads_q /= static_cast<double>(heads);
    work.seq_q = static_cast<double>(heads);
  }
  return work;
}

// Times are in microseconds, and rates are per microsecond and multiprocessor unless stated
// otherwise. For compute capability 9.0 they are fitted to measurements on an H200
// (docs/kernels/attention_sm89_few_rows.md and attention_sm90.md); for others they are estimates.
inline constexpr double kMemoryShare = 0.88;  // of the memory's peak rate
inline constexpr double kUnhidden = 0.1;      // part of overlapped work that still adds time

inline double ceil_of(double a, double b) {
  return static_cast<double>(ceil_div(static_cast<int64_t>(a), static_cast<int64_t>(b)));
}

inline double memory_microseconds(const Work& work, const DeviceFacts& facts,
                                  double share = kMemoryShare) {
  if (facts.memory_bytes_per_microsecond <= 0) return 0;
  // All rows together see a little more than the row that sees most.
  return work.heads_kv * std::min(work.most_keys + work.seq_q, work.seq_k) * work.key_bytes /
         (facts.memory_bytes_per_microsecond * share);
}

// Speed of one multiprocessor on tiles of many rows, with tensor cores.
struct TileSpeed {
  double rate;   // floating-point operations
  double start;  // microseconds of a launch
  double rows;   // rows per tile
  double memory_share = kMemoryShare;
};

// Time of tiles of many rows of one query head. `share` is the time of a step relative to that with
// full tiles on all multiprocessors. With several waves, missing rows cost as much as existing
// ones.
inline double tile_microseconds(const Work& work, const TileSpeed& speed, double share,
                                const DeviceFacts& facts) {
  const double tiles = work.heads_q * ceil_of(work.seq_q, speed.rows);
  const double waves = ceil_of(tiles, facts.multiprocessors);
  const double keys = waves > 1 ? work.keys : work.most_keys;
  const double run = share * (waves * speed.rows * keys * work.dims * 2 / speed.rate);
  const double memory = memory_microseconds(work, facts, speed.memory_share);
  return speed.start + std::max(run, memory) + kUnhidden * std::min(run, memory);
}

}  // namespace flashmoe
