// The tensors of a call, as the device sees them.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

struct AttentionTensors {
  float* lse;  // [batch, heads_q, seq_q] or nullptr
  RowStrides lse_strides;

  const uint16_t* q;     // [batch, seq_q, heads_q, dim]
  const uint16_t* k;     // [batch, seq_k, heads_kv, dim]
  const uint16_t* v;     // [batch, seq_k, heads_kv, dim_v]
  uint16_t* out;         // [batch, seq_q, heads_q, dim_v]
  RowStrides q_strides;  // elements
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  int32_t dim;
  int32_t dim_v;
};

}  // namespace flashmoe
