// What the families' estimates of a call's time have in common. Each has its own constants, in a
// cost.h beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
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
  double key_bytes;  // of a key and its value
  double seq_k;
};

// Of a key and its value.
inline int64_t key_bytes(const AttentionProblem& p) {
  return p.dim * dtype_bytes(p.k.dtype) + p.dim_v * dtype_bytes(p.v.dtype);
}

// Of a ragged, padded or paged batch, whose lengths are not known: a dense problem of as many
// sequences, of queries and keys that the rows of the tensors suffice for.
AttentionProblem alike(const AttentionProblem& problem);

// Of ragged, padded and paged batches: as if all sequences were alike.
Work work_of(const AttentionProblem& problem);

// The same where the queries of so many heads, one each, are the rows of a tile.
inline Work with_packed_heads(Work work, int64_t heads) {
  if (heads > 1) {
    work.heads_q /= static_cast<double>(heads);
    work.seq_q = static_cast<double>(heads);
  }
  return work;
}

// Times in microseconds, rates per microsecond, of one multiprocessor where not said otherwise. On
// compute capability 9.0 they are fitted to measurements on an H200
// (docs/kernels/attention_sm89_few_rows.md and attention_sm90.md), on others they are estimates.
inline constexpr double kMemoryShare = 0.88;  // of the memory's peak
inline constexpr double kUnhidden = 0.1;      // of what goes on beside something longer

inline double ceil_of(double a, double b) {
  return static_cast<double>((static_cast<int64_t>(a) + static_cast<int64_t>(b) - 1) /
                             static_cast<int64_t>(b));
}

inline double memory_microseconds(const Work& work, const DeviceFacts& facts,
                                  double share = kMemoryShare) {
  if (facts.memory_bytes_per_microsecond <= 0) return 0;
  // All rows together see a little more than the one that sees most.
  return work.heads_kv * std::min(work.most_keys + work.seq_q, work.seq_k) * work.key_bytes /
         (facts.memory_bytes_per_microsecond * share);
}

// Tiles of many rows by the tensor cores of a multiprocessor.
struct TileSpeed {
  double rate;   // floating-point operations
  double start;  // of a launch
  double rows;   // of a tile
};

// Tiles of many rows of one query head, of which a step takes `share` of what it takes where all
// multiprocessors have full ones. Where there are several waves, rows that are not there cost as
// much.
inline double tile_microseconds(const Work& work, const TileSpeed& speed, double share,
                                const DeviceFacts& facts) {
  const double tiles = work.heads_q * ceil_of(work.seq_q, speed.rows);
  const double waves = ceil_of(tiles, facts.multiprocessors);
  const double keys = waves > 1 ? work.keys : work.most_keys;
  const double run = share * (waves * speed.rows * keys * work.dims * 2 / speed.rate);
  const double memory = memory_microseconds(work, facts);
  return speed.start + std::max(run, memory) + kUnhidden * std::min(run, memory);
}

}  // namespace flashmoe
