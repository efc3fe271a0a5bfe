#include "core/ops/attention/problem.h"

#include <algorithm>

namespace flashmoe {
namespace {

__extension__ typedef __int128 Wide;  // exact: a difference of pairs may be far below both

// Counts pairs of a row i and a key j < i + offset. A row has clamp(i + offset, 0, keys) of them:
// first none, then a ramp, then all.
Wide pairs_before(int64_t offset, int64_t rows, int64_t keys) {
  const Wide ramp_begin = std::clamp<int64_t>(-offset, 0, rows);
  const Wide ramp_end = std::clamp<int64_t>(keys - offset, 0, rows);
  const Wide ramp = (ramp_end - ramp_begin) * (2 * offset + ramp_begin + ramp_end - 1) / 2;
  return ramp + (rows - ramp_end) * keys;
}

// FLOPs of one multiply-add for each pair of a query and a key that it sees.
double flops_of_a_dimension(const AttentionProblem& p) {
  Wide pairs = Wide{p.seq_q} * p.seq_k;
  if (p.bounded_right) pairs = pairs_before(p.right_offset + 1, p.seq_q, p.seq_k);
  if (p.bounded_left) pairs -= pairs_before(p.left_offset, p.seq_q, p.seq_k);
  return 2.0 * static_cast<double>(p.batch) * static_cast<double>(p.heads_q) *
         static_cast<double>(pairs);
}

bool has_tables(const SequenceTables& tables) {
  bool any = false;
  visit_tables(tables, [&](const Numbers* table) { any = any || table->data != nullptr; });
  return any;
}

// Sequences without tables are as long as the tensors. Only their mask has not become bounds.
template <class Problem>
Problem as_one_batch(Problem p) {
  if (p.sequences.given) set_bounds(p.sequences.mask, &p);
  return p;
}

}  // namespace

void set_bounds(const AttentionMask& mask, AttentionProblem* problem) {
  const bool from_ends = mask.causal != FLASHMOE_CAUSAL_TOP_LEFT;
  set_bounds_at(from_ends ? problem->seq_k - problem->seq_q : 0, mask, problem);
}

void set_bounds_at(int64_t diagonal, const AttentionMask& mask, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  const bool causal = mask.causal != FLASHMOE_CAUSAL_NONE;
  // This bound hides nothing and cannot overflow.
  const int64_t longest = p.seq_q + p.seq_k + std::max(diagonal, -diagonal);
  p.left_offset = diagonal - std::min(mask.window_left, longest);
  p.right_offset = diagonal + std::min(mask.window_right, longest);
  p.bounded_left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0 && p.left_offset > 1 - p.seq_q;
  p.bounded_right =
      (causal || (mask.window & FLASHMOE_WINDOW_RIGHT) != 0) && p.right_offset < p.seq_k - 1;
  p.left_offset = p.bounded_left ? std::min(p.left_offset, p.seq_k) : 0;
  p.right_offset = p.bounded_right ? std::max(p.right_offset, -p.seq_q) : 0;
}

double attention_flops(const AttentionProblem& p) {
  return flops_of_a_dimension(p) * static_cast<double>(p.dim + p.dim_v);
}

double attention_backward_flops(const AttentionBackwardProblem& p) {
  // dsinks needs no products, only numbers per row.
  if (p.dq.data == nullptr && p.dk.data == nullptr && p.dv.data == nullptr) return 0;
  int64_t dims = p.dim;                                               // scores
  if (p.dq.data != nullptr || p.dk.data != nullptr) dims += p.dim_v;  // dout v
  if (p.dq.data != nullptr) dims += p.dim;
  if (p.dk.data != nullptr) dims += p.dim;
  if (p.dv.data != nullptr) dims += p.dim_v;
  return flops_of_a_dimension(p) * static_cast<double>(dims);
}

double planned_flops(const AttentionProblem& p) {
  if (has_tables(p.sequences)) return 0;
  return attention_flops(as_one_batch(p));
}

double planned_flops(const AttentionBackwardProblem& p) {
  if (has_tables(p.sequences)) return 0;
  return attention_backward_flops(as_one_batch(p));
}

}  // namespace flashmoe
