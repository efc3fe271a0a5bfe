#include "cuda/attention/cost.h"

#include <algorithm>

namespace flashmoe {
namespace {

int64_t visible_keys(const AttentionProblem& p, int64_t query) {
  const int64_t first = p.bounded_left ? std::max<int64_t>(0, query + p.left_offset) : 0;
  const int64_t end = p.bounded_right ? std::min(p.seq_k, query + p.right_offset + 1) : p.seq_k;
  return std::max<int64_t>(0, end - first);
}

}  // namespace

AttentionProblem alike(const AttentionProblem& p) {
  const SequenceTables& tables = p.sequences;
  const int64_t batch = std::max<int64_t>(p.batch, 1);
  AttentionProblem dense = p;
  dense.sequences = {};
  if (tables.cu_seqlens_q.data != nullptr) {
    dense.seq_q = std::min(p.seq_q, ceil_div(tables.rows_q, batch));
  }
  if (tables.cu_seqlens_k.data != nullptr) {
    dense.seq_k = std::min(p.seq_k, ceil_div(tables.rows_k, batch));
  } else if (tables.paged) {
    dense.seq_k = std::min(p.seq_k, ceil_div(tables.batch_k, batch) * tables.rows_k);
  }
  set_bounds(tables.mask, &dense);
  return dense;
}

Work work_of(const AttentionProblem& p) {
  if (p.sequences.given) return work_of(alike(p));
  Work work;
  work.heads_kv = static_cast<double>(p.batch * p.heads_kv);
  work.heads_q = static_cast<double>(p.batch * p.heads_q);
  work.seq_q = static_cast<double>(p.seq_q);
  work.rows = static_cast<double>(p.seq_q * (p.heads_q / p.heads_kv));
  work.dims = static_cast<double>(p.dim + p.dim_v);
  work.key_bytes = static_cast<double>(key_bytes(p));
  work.seq_k = static_cast<double>(p.seq_k);
  work.keys = work.most_keys = work.seq_k;
  if ((p.bounded_left || p.bounded_right) && p.batch > 0 && p.seq_q > 0) {
    work.keys = attention_flops(p) / (2 * work.heads_q * work.dims * work.seq_q);
    // The number of visible keys as a function of the query bends only where a bound meets an end
    // of the keys.
    const auto query = [&](int64_t i) { return std::clamp<int64_t>(i, 0, p.seq_q - 1); };
    const int64_t left = p.bounded_left ? query(-p.left_offset) : 0;
    const int64_t right = p.bounded_right ? query(p.seq_k - 1 - p.right_offset) : 0;
    work.most_keys = static_cast<double>(std::max({visible_keys(p, 0), visible_keys(p, p.seq_q - 1),
                                                   visible_keys(p, left), visible_keys(p, right)}));
  }
  return work;
}

}  // namespace flashmoe
