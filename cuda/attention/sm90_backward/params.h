// Kernel parameters of the sm_90 attention backward, filled on the host.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/tile/extents.h"
#include "cuda/tile/score_options.h"

namespace flashmoe::sm90_backward {

// What a coordinate of a batch or head is multiplied by: 0 where the view repeats one of them,
// which its map then holds once.
struct Repeats {
  int32_t batch;
  int32_t head;
};

// A gradient that consumers write from their registers, in fp32 or added to what is there. Without
// `rows` the copy engine writes it, by its map.
struct Direct {
  void* rows;
  RowStrides strides;
  int32_t fp32;
};

// In which order blocks take the items of the call's KV heads: tile.cuh.
struct HeadOrder {
  int32_t descending;        // the first so many heads descend
  int32_t descending_group;  // heads whose items alternate
  int32_t ascending_group;
};

// No count of the GPU at hand is in the order: the bits of dQ depend on it.
inline constexpr int64_t kBlocksOfLargest = 132;
inline constexpr int64_t kGroupBytes = int64_t{8} << 20;

// `head_bytes` is what the items of a head read and add again and again, `bounded_right` whether a
// row sees no key behind its own.
inline HeadOrder order_of(int64_t heads, int64_t heads_per_kv, int64_t tiles_k, int64_t head_bytes,
                          bool bounded_right) {
  tiles_k = std::max(tiles_k, int64_t{1});
  // Two items for each block: the longest ones come first among so many heads.
  const int64_t filling = ceil_div(2 * kBlocksOfLargest, tiles_k);
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
  // Items of one length should be many of each head at a time, for the L2.
  constexpr int64_t kFew = 4;
  order.ascending_group = groups_of(heads - order.descending, bounded_right ? filling : kFew);
  return order;
}

struct Params {
  // Tensor maps over [dim, seq, heads, batch] in boxes of 64 elements by so many rows: kTileQ for q
  // and dout, kTileK for k and v, 64 for the gradients.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap dq;
  CUtensorMap dk;
  CUtensorMap dv;

  Repeats q_repeats;
  Repeats k_repeats;
  Repeats v_repeats;
  Repeats dout_repeats;

  // For the prologue, which reads and writes rows.
  const uint16_t* out_rows;
  const uint16_t* dout_rows;
  uint16_t* dq_rows;  // nullptr: not wanted, or in dq_direct
  const float* lse;   // [batch, heads_q, seq_q]
  const float* dlse;  // the same, or nullptr
  RowStrides out_strides;
  RowStrides dout_strides;
  RowStrides dq_strides;
  RowStrides lse_strides;
  RowStrides dlse_strides;

  Direct dq_direct;
  Direct dk_direct;
  Direct dv_direct;
  int32_t accumulate;  // by those of them that have rows, and by dsinks

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
  HeadOrder order;
};

static_assert(sizeof(Params) <= 4096, "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm90_backward
