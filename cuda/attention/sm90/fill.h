// Parameters that follow from a problem alone, whatever its tiles.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm90/params.h"

namespace flashmoe::sm90 {

inline Repeats repeats(const RowStrides& strides) {
  return {strides.batch == 0 ? 0 : 1, strides.head == 0 ? 0 : 1};
}

inline void fill_tensors(const AttentionProblem& p, Params* params) {
  fill_common(p, params);
  params->q_repeats = repeats(p.q_strides);
  params->k_repeats = repeats(p.k_strides);
  params->v_repeats = repeats(p.v_strides);
  params->seq_q = static_cast<int32_t>(p.seq_q);
  params->heads_q = static_cast<int32_t>(p.heads_q);
  params->heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
}

}  // namespace flashmoe::sm90
