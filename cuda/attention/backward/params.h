// What the kernels of every family of the attention backward get, filled on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/tile/extents.h"
#include "cuda/tile/score_options.h"

namespace flashmoe::attention_backward {

// [batch, seq, heads, dim]
struct Rows {
  const uint16_t* data;
  RowStrides strides;  // elements
};

struct Gradient {
  void* rows;  // nullptr: not wanted
  RowStrides strides;
  int32_t fp32;  // else of the elements' type
};

// A family's parameters begin with it: the prologue and the kernel of dsinks get no more.
struct CommonParams {
  Rows q_rows;
  Rows k_rows;
  Rows v_rows;
  Rows out_rows;
  Rows dout_rows;
  const float* lse;   // [batch, heads_q, seq_q]
  const float* dlse;  // the same, or nullptr
  RowStrides lse_strides;
  RowStrides dlse_strides;

  Gradient dq_rows;
  Gradient dk_rows;
  Gradient dv_rows;
  int32_t accumulate;  // gradients are added to what is there

  void* dsinks;  // [heads_q], nullptr: not wanted
  int64_t dsink_stride;
  int32_t dsinks_are_fp32;  // or else of the elements' type

  // The workspace. Rows are padded to whole tiles; heads are batch * heads_q.
  float* row_lse;    // [heads, rows]: lse * log2(e), infinity where a row sees no key
  float* row_delta;  // [heads, rows]: sum of dout * out, less dlse
  // [heads, tiles_q, panels, kTileQ * dim / panels]: sums of parts of dQ, in fragments' order
  float* dq_sums;
  uint32_t* turns;   // [heads, tiles_q, panels]: parts that a panel of a tile of dQ has so far
  uint32_t* ticket;  // items that were taken so far

  int32_t batch;
  int32_t seq_q;
  int32_t seq_k;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t heads_per_kv;
  int32_t dim;
  int32_t dim_v;
  ScoreOptions score;
  float scale;

  int32_t tiles_q;  // of a head
  int32_t tiles_k;  // of a KV head
  // KV heads of the whole call: tile.cuh.
  int32_t heads_descending;
  int32_t heads_per_group;  // of those that descend, whose items alternate
};

// As many heads ascend as have two items for each block of the largest GPU, all of them where fewer
// would descend. No count of the GPU at hand is in it: the bits of dQ depend on it.
inline constexpr int64_t kAscendingItems = 264;
inline int64_t heads_descending(int64_t heads, int64_t tiles_k) {
  const int64_t ascending = ceil_div(kAscendingItems, std::max(tiles_k, int64_t{1}));
  return heads - ascending < ascending ? 0 : heads - ascending;
}

// Few heads that alternate have many items each at a time, which share Q, dO and sums of dQ in the
// L2. Without a mask all items of a head begin with the same query tile, and each waits at its
// first steps for the one before it: there should be a few.
inline constexpr int64_t kMostHeadsPerGroup = 8;
inline int64_t heads_per_group(int64_t heads) {
  const int64_t groups = ceil_div(std::max(heads, int64_t{1}), kMostHeadsPerGroup);
  return ceil_div(std::max(heads, int64_t{1}), groups);
}

}  // namespace flashmoe::attention_backward
