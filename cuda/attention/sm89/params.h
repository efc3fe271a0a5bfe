// Arguments of the sm_89 attention kernel, as the device sees them.
#pragma once

#include "core/attention.h"

namespace flashmoe::sm89 {

struct Params {
  const void* q;  // [batch, seq_q, heads_q, dim]
  const void* k;  // [batch, seq_k, heads_kv, dim]
  const void* v;  // [batch, seq_k, heads_kv, dim_v]
  void* out;      // [batch, seq_q, heads_q, dim_v]
  float* lse;     // [batch, heads_q, seq_q] or nullptr

  RowStrides q_strides;  // elements
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  RowStrides lse_strides;

  int32_t seq_q;
  int32_t seq_k;
  int32_t heads_q;
  int32_t heads_per_kv;
  int32_t dim;
  int32_t dim_v;
  int32_t causal;
  int32_t causal_offset;  // query i sees keys j <= i + causal_offset
  float scale_log2;       // scale * log2(e)

  int32_t tiles_per_head;     // query tiles
  int32_t heads;              // batch * heads_q
  int32_t heads_per_section;  // heads whose K and V share the L2
};

}  // namespace flashmoe::sm89
