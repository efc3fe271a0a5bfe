// Arguments of the sm_90 attention kernel, as the device sees them.
#pragma once

#include <cuda.h>

#include "core/attention.h"

namespace flashmoe::sm90 {

struct Params {
  // Tensor maps over [dim, seq, heads, batch] in boxes of 64 elements by so many rows: kTileQ, keys of
  // a step twice, and the 64 rows that a warpgroup writes.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;

  float* lse;  // [batch, heads_q, seq_q] or nullptr
  RowStrides lse_strides;

  int32_t seq_q;
  int32_t seq_k;
  int32_t heads_q;
  int32_t heads_per_kv;
  int32_t causal;
  int32_t causal_offset;  // query i sees keys j <= i + causal_offset
  float scale_log2;       // scale * log2(e)

  int32_t tiles_per_head;     // query tiles
  int32_t heads;              // batch * heads_q
  int32_t heads_per_section;  // heads whose K and V share the L2
};

}  // namespace flashmoe::sm90
