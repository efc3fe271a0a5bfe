// Parameters that follow from the problem alone, for any tiles.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {

inline Repeats repeats(const RowStrides& strides) {
  return {strides.batch == 0 ? 0 : 1, strides.head == 0 ? 0 : 1};
}

inline void fill_addresses(const AttentionProblem& p, Params* params) {
  params->tensors.q = static_cast<const uint16_t*>(p.q.data);
  params->tensors.k = static_cast<const uint16_t*>(p.k.data);
  params->tensors.v = static_cast<const uint16_t*>(p.v.data);
  params->tensors.out = static_cast<uint16_t*>(p.out.data);
  params->tensors.lse = static_cast<float*>(p.lse);
  params->score = score_options(p);
}

inline void fill_tensors(const AttentionProblem& p, Params* params) {
  fill_common(p, params);
  params->q_repeats = repeats(p.q.strides);
  params->k_repeats = repeats(p.k.strides);
  params->v_repeats = repeats(p.v.strides);
  params->seq_q = static_cast<int32_t>(p.seq_q);
  params->heads_q = static_cast<int32_t>(p.heads_q);
  params->heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
}

// Kept with a plan: the parameters of its launches, and the addresses of their maps: q, k, v and,
// for tiles of one head, out. A call at other addresses moves the maps.
template <class AnyParams>
struct Kept {
  AnyParams params;
  const void* mapped[4];
};

// The address for a map of k or v. Without keys it may be null, which no map accepts; nothing is
// read then.
inline const void* mapped_keys(const AttentionProblem& p, const void* data) {
  return p.seq_k > 0 ? data : p.q.data;
}

template <class AnyParams>
bool move_inputs(const AttentionProblem& p, Kept<AnyParams>* kept) {
  AnyParams& params = kept->params;
  fill_addresses(p, &params);
  return move_map(&params.q, &kept->mapped[0], p.q.data) &&
         move_map(&params.k, &kept->mapped[1], mapped_keys(p, p.k.data)) &&
         move_map(&params.v, &kept->mapped[2], mapped_keys(p, p.v.data));
}

}  // namespace flashmoe::sm90
