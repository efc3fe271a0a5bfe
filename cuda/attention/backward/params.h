// Parameters of the kernels of every family of the attention backward, filled on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/backward/order.h"
#include "cuda/tile/extents.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/score_pairs.h"

namespace flashmoe::attention_backward {

// [batch, seq, heads, dim]
struct Rows {
  const uint16_t* data;
  RowStrides strides;  // elements
};

struct Gradient {
  void* rows;  // nullptr: not wanted
  RowStrides strides;
  int32_t fp32;  // otherwise the elements' type
};

inline constexpr int64_t kMostSplits = 4;

// The last items of the order may be split: each of `splits` blocks takes some of the query tiles.
struct SplitItems {
  int32_t first;  // the number of items: none is split
  int32_t splits;
};

// Without bounds all items take the same time, so items after the last full round leave blocks
// idle. They are split if that ends sooner. Less than one round of items is not split: the launches
// dominate the time of a short call. `tiles_q` is per head.
inline SplitItems split_of(int64_t items, int64_t tiles_q, int64_t heads_per_kv, bool bounded) {
  constexpr int64_t kItemSteps = 2;     // steps that an item takes in addition
  constexpr int64_t kCombineSteps = 1;  // steps that passing on its sums takes
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

// A family's parameters begin with these. The prologue and the kernel of dsinks get only these.
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
  int32_t accumulate;  // gradients are added to the old values

  void* dsinks;  // [heads_q]; nullptr: not wanted
  int64_t dsink_stride;
  int32_t dsinks_are_fp32;  // otherwise the elements' type

  // The workspace. Rows are padded to whole tiles; heads are batch * heads_q.
  // [heads, rows]: lse * log2(e), infinity if a row sees no key. With a bias it is lse itself,
  // which may be too low to be multiplied.
  float* row_lse;
  float* row_delta;  // [heads, rows]: sum of dout * out, minus dlse
  // [heads, tiles_q, panels, kTileQ * dim / panels]: sums of parts of dQ, in fragment order
  float* dq_sums;
  uint32_t* turns;   // [heads, tiles_q, panels]: parts that a panel of a tile of dQ has received
  uint32_t* ticket;  // items that have been taken
  // Sums of split items: dV and dK of all splits except the last, [split items, splits - 1, ...] in
  // fragment order, and how many warps have left theirs.
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

  int32_t tiles_q;  // per head
  int32_t tiles_k;  // per KV head
  HeadOrder order;
  SplitItems split;
};

// Parameters of calls with a bias or a mask.
struct BiasedParams : CommonParams {
  ScorePairs pairs;
};

}  // namespace flashmoe::attention_backward
