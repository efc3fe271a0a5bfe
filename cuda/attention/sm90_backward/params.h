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

  int32_t tiles_q;          // of a head
  int32_t tiles_k;          // of a KV head
  int32_t heads_per_group;  // KV heads whose items alternate
};

// How many KV heads alternate: as many as have what an item reads and adds again and again, Q, dO
// and the sums of dQ, in so many bytes of the L2. With more, sums go to memory and back; with
// fewer, items wait for each other. Under a mask half of it is in use at a time. A group has about
// as many items as blocks run at a time, or more: the longest ones of the last group begin when the
// shortest of the one before end. Groups are equal but for rounding.
inline int32_t heads_per_group(const Params& p, int64_t bytes, int64_t blocks) {
  const int64_t heads = std::max(int64_t{p.batch} * p.heads_kv, int64_t{1});
  const int64_t of_head = int64_t{p.seq_q} * p.heads_per_kv * (6 * p.dim + 2 * p.dim_v);
  const int64_t fit = (p.score.masked ? 2 : 1) * bytes / std::max(of_head, int64_t{1});
  const int64_t by_bytes = ceil_div(heads, std::clamp(fit, int64_t{1}, heads));
  const int64_t by_items = heads * p.tiles_k / std::max(blocks - blocks / 16, int64_t{1});
  const int64_t groups = std::clamp(by_items, int64_t{1}, by_bytes);
  return static_cast<int32_t>(ceil_div(heads, groups));
}
inline constexpr int64_t kGroupBytes = int64_t{32} << 20;

static_assert(sizeof(Params) <= 4096, "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm90_backward
