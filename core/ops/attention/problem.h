// The attention problem and its plan: what the C ABI's arguments become after one validation, and
// what every backend takes. Plain structs; see docs/architecture.md for the flow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;

// Element strides of a [batch, seq, heads, dim] view; the last one is 1.
struct RowStrides {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// A [batch, seq, heads, dim] view, of a dtype of its own.
template <class Data>
struct RowsView {
  Data* data;
  RowStrides strides;
  Dtype dtype;
  int32_t gap;  // 0: the bytes of problems are compared (core/plan_cache.h)
};

// A validated call. Every extent and every reachable byte offset fits in int64; batch, seq_q and
// seq_k may be 0; dim and dim_v are multiples of kHeadDimMultiple up to kMaxHeadDim; heads_q % heads_kv == 0. The four views are
// of one dtype: no kernel takes others yet.
struct AttentionProblem {
  flashmoe_device device;

  RowsView<const void> q;  // [batch, seq_q, heads_q, dim]
  RowsView<const void> k;  // [batch, seq_k, heads_kv, dim]
  RowsView<const void> v;  // [batch, seq_k, heads_kv, dim_v]
  RowsView<void> out;      // [batch, seq_q, heads_q, dim_v]
  float* lse;              // [batch, heads_q, seq_q] or nullptr
  RowStrides lse_strides;  // same axes; element strides of lse, in which the last axis is seq

  int64_t batch;
  int64_t seq_q;
  int64_t seq_k;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t dim;
  int64_t dim_v;

  KernelName kernel;  // the kernel or family that the call asks for, or ""
  float scale;        // finite and > 0
  float softcap;      // finite and > 0, or 0 for none: logits are softcap * tanh(cap_ratio * q.k)
  float cap_ratio;    // scale / softcap, normal and finite; 0 without a softcap

  // Query i sees the keys j >= i + left_offset and j <= i + right_offset, as far as bounded. A
  // bound that hides no key of any row is not set. Offsets lie in [-seq_q, seq_k], 0 where not
  // bounded, and left_offset <= right_offset where both are.
  bool bounded_left;
  bool bounded_right;
  int64_t left_offset;
  int64_t right_offset;
};

// Multiply-adds of the two products count as two; pairs of a query and a key that it does not see
// do not count.
double attention_flops(const AttentionProblem& problem);

template <class Visit>
void visit_addresses(AttentionProblem* p, const Visit& visit) {
  visit(&p->q.data);
  visit(&p->k.data);
  visit(&p->v.data);
  visit(&p->out.data);
  visit(&p->lse);
}

}  // namespace flashmoe
