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

  int32_t tiles_q;          // of a head
  int32_t tiles_k;          // of a KV head
  int32_t heads_per_group;  // KV heads whose items alternate
};

// How many KV heads alternate: as many as have what an item reads and adds again and again, Q, dO
// and the sums of dQ, in so many bytes of the L2. With more, sums go to memory and back; with
// fewer, items wait for each other. Under a mask half of it is in use at a time. A group has about
// as many items as blocks run at a time, or more: the longest ones of the last group begin when the
// shortest of the one before end. Groups are equal but for rounding.
inline int32_t heads_per_group(const CommonParams& p, int64_t bytes, int64_t blocks) {
  const int64_t heads = std::max(int64_t{p.batch} * p.heads_kv, int64_t{1});
  const int64_t of_head = int64_t{p.seq_q} * p.heads_per_kv * (6 * p.dim + 2 * p.dim_v);
  const int64_t fit = (p.score.masked ? 2 : 1) * bytes / std::max(of_head, int64_t{1});
  const int64_t by_bytes = ceil_div(heads, std::clamp(fit, int64_t{1}, heads));
  const int64_t by_items = heads * p.tiles_k / std::max(blocks - blocks / 16, int64_t{1});
  const int64_t groups = std::clamp(by_items, int64_t{1}, by_bytes);
  return static_cast<int32_t>(ceil_div(heads, groups));
}

}  // namespace flashmoe::attention_backward
