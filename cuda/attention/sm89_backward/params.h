// Kernel parameters of the sm_89 attention backward, filled on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/tile/score_options.h"

namespace flashmoe::sm89_backward {

// [batch, seq, heads, dim]
struct Rows {
  const uint16_t* data;
  RowStrides strides;  // elements
};

struct Gradient {
  void* data;  // nullptr: not wanted
  RowStrides strides;
  int32_t fp32;  // else of the elements' type
};

struct Params {
  Rows q;
  Rows k;
  Rows v;
  Rows out;
  Rows dout;
  const float* lse;   // [batch, heads_q, seq_q]
  const float* dlse;  // the same, or nullptr
  RowStrides lse_strides;
  RowStrides dlse_strides;
  Gradient dq;
  Gradient dk;
  Gradient dv;
  int32_t accumulate;  // into what the gradients hold

  // The workspace. Rows are padded to whole tiles; heads are batch * heads_q.
  float* row_lse;    // [heads, rows]: lse * log2(e), infinity where a row sees no key
  float* row_delta;  // [heads, rows]: sum of dout * out, less dlse
  float* dq_sums;    // [heads, tiles_q, kTileQ * kDim]: sums of parts of dQ, in fragments' order
  uint32_t* turns;   // [heads, tiles_q]: parts that a tile of dQ has so far
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
// fewer, items wait for each other. Under a mask half of it is in use at a time.
inline int32_t heads_per_group(const Params& p, int64_t bytes) {
  const int64_t of_head = int64_t{p.seq_q} * p.heads_per_kv * (6 * p.dim + 2 * p.dim_v);
  const int64_t fit = (p.score.masked ? 2 : 1) * bytes / std::max(of_head, int64_t{1});
  return static_cast<int32_t>(
      std::clamp(fit, int64_t{1}, std::max(int64_t{p.batch} * p.heads_kv, int64_t{1})));
}

static_assert(sizeof(Params) <= 4096, "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm89_backward
