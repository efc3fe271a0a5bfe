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
  // Query i sees the keys from i + left_offset to i + right_offset, as far as there are such keys.
  // An absent bound lies beyond all of them; row + offset + 1 fits.
  int32_t left_offset;
  int32_t right_offset;
  int32_t masked;    // some row does not see every key
  float scale_log2;  // scale * log2(e); with a softcap softcap * log2(e)
  float cap_ratio;   // scale / softcap; 0 without

  int32_t tiles_per_head;       // query tiles
  int32_t longest_tiles_first;  // they are the longest
  int32_t heads;                // batch * heads_q
  int32_t heads_per_swizzle;    // heads whose K and V share the L2
};

}  // namespace flashmoe::sm89
