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

// In which order blocks take the items of the call's KV heads: tile.cuh.
struct HeadOrder {
  int32_t descending;        // the first so many heads descend
  int32_t descending_group;  // heads whose items alternate
  int32_t ascending_group;
};

// No count of the GPU at hand is in the order: the bits of dQ depend on it.
inline constexpr int64_t kBlocksOfLargest = 132;
inline constexpr int64_t kGroupBytes = int64_t{16} << 20;

// `head_bytes` is what the items of a head read and add again and again, `bounded_right` whether a
// row sees no key behind its own, `at_a_time` how many items the largest GPU runs.
inline HeadOrder order_of(int64_t heads, int64_t heads_per_kv, int64_t tiles_k, int64_t head_bytes,
                          bool bounded_right, int64_t at_a_time = kBlocksOfLargest) {
  tiles_k = std::max(tiles_k, int64_t{1});
  // Up to two items for each block: the longest ones come first among so many heads.
  const int64_t filling = std::max(2 * at_a_time / tiles_k, int64_t{1});
  HeadOrder order = {0, 1, 1};
  // With query heads inside an item, neighbours that descend are too far from each other for the
  // L2. Without a bound all items begin with the same query tile, whatever the order.
  if (bounded_right && heads_per_kv == 1 && heads >= 2 * filling) {
    order.descending = static_cast<int32_t>(heads - filling);
  }
  const auto groups_of = [](int64_t count, int64_t most) {
    count = std::max(count, int64_t{1});
    const int64_t groups = ceil_div(count, std::clamp(most, int64_t{1}, count));
    return static_cast<int32_t>(ceil_div(count, groups));
  };
  // What heads that alternate use stays in the L2, and their items wait for each other less.
  order.descending_group =
      groups_of(order.descending, kGroupBytes / std::max(head_bytes, int64_t{1}));
  // Without a bound, items of long sequences that begin together still come one by one to a sum.
  constexpr int64_t kFewUnbounded = 8;
  order.ascending_group = groups_of(heads - order.descending,
                                    bounded_right ? filling : std::max(filling, kFewUnbounded));
  return order;
}

inline constexpr int64_t kMostSplits = 4;

// The last items of the order may be split: each of `splits` blocks has some of the query tiles.
struct SplitItems {
  int32_t first;  // as many as there are items: none is split
  int32_t splits;
};

// Without bounds all items take the same time, so those behind the last full round leave blocks
// idle. They are split where that ends sooner. Fewer items than a round are not: the time of a
// short call is that of its launches. `tiles_q` is of a head.
inline SplitItems split_of(int64_t items, int64_t tiles_q, int64_t heads_per_kv, bool bounded) {
  constexpr int64_t kItemSteps = 2;     // what an item takes beside its steps
  constexpr int64_t kCombineSteps = 1;  // and what passing on its sums takes
  SplitItems best = {static_cast<int32_t>(items), 1};
  const int64_t left = items % kBlocksOfLargest;
  if (bounded || left == 0 || items < kBlocksOfLargest) return best;
  int64_t best_steps = tiles_q * heads_per_kv + kItemSteps;
  for (int64_t splits = 2; splits <= std::min(kMostSplits, tiles_q); ++splits) {
    const int64_t steps = ceil_div(left * splits, kBlocksOfLargest) *
                          (ceil_div(tiles_q, splits) * heads_per_kv + kItemSteps + kCombineSteps);
    if (steps >= best_steps) continue;
    best_steps = steps;
    best = {static_cast<int32_t>(items - left), static_cast<int32_t>(splits)};
  }
  return best;
}

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
  // Of a split item: dV and dK of all splits but the last, [split items, splits - 1, ...] in
  // fragments' order, and how many warps have left theirs.
  float* split_sums;
  uint32_t* split_turns;

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
  HeadOrder order;
  SplitItems split;
};

}  // namespace flashmoe::attention_backward
