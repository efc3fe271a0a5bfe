// The attention problem and its plan: what the C ABI's arguments become after one validation, and
// what every backend takes. Plain structs; see docs/architecture.md for the flow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/dtype.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int64_t kMaxHeadDim = 576;
inline constexpr int64_t kMaxHeadDimV = 512;
// The limit of calls with gradients, and of most families' kernels.
inline constexpr int64_t kMaxGradientHeadDim = 256;
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

// [heads_q]; data is nullptr: absent.
struct HeadLogits {
  const void* data;
  int64_t stride;  // elements
  Dtype dtype;
  int32_t gap;
};

// [batch] or [batch + 1] int32 numbers; data is nullptr: absent.
struct Numbers {
  const void* data;
  int64_t stride;  // elements

  int64_t at(int64_t i) const { return static_cast<const int32_t*>(data)[i * stride]; }
};

// [first extent of k, heads_kv] fp32 factors; data is nullptr: absent, 1.
struct KeyScales {
  const void* data;
  int64_t batch_stride;  // elements; 0 where rows of the batch, or pages, have one
  int64_t head_stride;

  const float* at(int64_t batch, int64_t head) const {
    return static_cast<const float*>(data) + batch * batch_stride + head * head_stride;
  }
};

// [batch, heads_q, seq_q, seq_k], of a dtype of its own; data is nullptr: absent. Strides are 0
// where one number stands for all. With sequences it has at least as many queries as seq_q, and as
// many keys as pair_keys, counted from the first row of keys of each sequence, whatever k_begin is.
struct PairsView {
  const void* data;
  int64_t batch_stride;  // elements
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;
  Dtype dtype;  // of a bias; a mask has bytes
  int32_t gap;
};

// What the caller says of the keys that a query sees, from which bounds are made with the lengths.
struct AttentionMask {
  int32_t causal;   // flashmoe_causal
  uint32_t window;  // bits of flashmoe_window
  int64_t window_left;
  int64_t window_right;
};

// Where the queries and keys of each sequence are: flashmoe_attention_sequences. Zeros of a dense
// batch.
struct SequenceTables {
  Numbers cu_seqlens_q;
  Numbers cu_seqlens_k;
  Numbers seqused_q;
  Numbers seqused_k;
  Numbers k_begin;
  Numbers batch_index;
  Numbers page_table;
  Numbers q_offset;
  int64_t page_step;   // from one number of a sequence's pages to the next, elements
  int64_t page_count;  // of a sequence, in the table
  int64_t rows_q;      // second extent of q: what offsets and lengths are cut to
  int64_t batch_k;     // first extent of k and v; with a page table their pages
  int64_t rows_k;      // second extent; with a page table the page size
  int64_t split_size;  // keys of the chunks that bits may depend on; 0: these may depend on all
  int64_t pair_keys;   // rows of keys that a sequence has at most: those of a bias or a mask
  AttentionMask mask;
  bool given;
  bool paged;
};

// A validated call. Every extent and every reachable byte offset fits in int64; batch, seq_q and
// seq_k may be 0; dim and dim_v are multiples of kHeadDimMultiple up to kMaxHeadDim and
// kMaxHeadDimV, with gradients up to kMaxGradientHeadDim; heads_q % heads_kv == 0. The four views
// are of one dtype, but that k and v may both be fp8. Sinks are of that dtype or of fp32.
//
// With sequences `batch` is their number, seq_q and seq_k bound their lengths, and no bound is set:
// each sequence is a problem of its own, which the lengths make (cpu/attention_sequences.h).
struct AttentionProblem {
  flashmoe_device device;

  RowsView<const void> q;  // [batch, seq_q, heads_q, dim]
  RowsView<const void> k;  // [batch, seq_k, heads_kv, dim]
  RowsView<const void> v;  // [batch, seq_k, heads_kv, dim_v]
  RowsView<void> out;      // [batch, seq_q, heads_q, dim_v]
  void* lse;               // [batch, heads_q, seq_q] or nullptr: fp32, of views of fp64 fp64
  RowStrides lse_strides;  // same axes; element strides of lse, in which the last axis is seq
  HeadLogits sinks;        // absent: none
  KeyScales k_scale;       // as numbers of k and v stand for this times themselves
  KeyScales v_scale;

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
  // v is the first dim_v columns of k, in the same memory: what reads k has read v.
  bool values_in_keys;
  int64_t left_offset;
  int64_t right_offset;

  SequenceTables sequences;

  // A key is hidden where the mask is 0 or the bias -inf.
  PairsView bias;
  PairsView mask;
};

// Whether k and v are not what q is: of 8 bits, or with scales.
inline bool has_scaled_keys(const AttentionProblem& p) {
  return p.k.dtype != p.q.dtype || p.k_scale.data != nullptr || p.v_scale.data != nullptr;
}

// Sets the four fields above from seq_q and seq_k, which may be anything from 0 up.
void set_bounds(const AttentionMask& mask, AttentionProblem* problem);
// The same where query 0 stands at this key, a number of 32 bits.
void set_bounds_at(int64_t diagonal, const AttentionMask& mask, AttentionProblem* problem);

// [heads_q]; data is nullptr: not wanted.
struct HeadSums {
  void* data;
  int64_t stride;  // elements
  Dtype dtype;
  int32_t gap;
};

// A validated call of the gradients of such a call, whose out and lse are inputs here. A gradient
// may be absent, but not all of them; each is of its tensor's dtype or of fp32. Sinks are there
// where dsinks are.
struct AttentionBackwardProblem : AttentionProblem {
  RowsView<const void> dout;  // as out
  const void* dlse;           // as lse, or nullptr: 0
  RowStrides dlse_strides;
  RowsView<void> dq;  // as q
  RowsView<void> dk;  // as k
  RowsView<void> dv;  // as v
  HeadSums dsinks;
  bool accumulate;  // gradients are added to what is there
};

// Multiply-adds of the two products count as two; pairs of a query and a key that it does not see
// do not count.
double attention_flops(const AttentionProblem& problem);
// The same of the products that the wanted gradients need, at most five.
double attention_backward_flops(const AttentionBackwardProblem& problem);

template <class Visit>
void visit_addresses(AttentionProblem* p, const Visit& visit) {
  visit(&p->q.data);
  visit(&p->k.data);
  visit(&p->v.data);
  visit(&p->out.data);
  visit(&p->lse);
  visit(&p->sinks.data);
  visit(&p->k_scale.data);
  visit(&p->v_scale.data);
  visit(&p->bias.data);
  visit(&p->mask.data);
  SequenceTables& tables = p->sequences;
  for (Numbers* each :
       {&tables.cu_seqlens_q, &tables.cu_seqlens_k, &tables.seqused_q, &tables.seqused_k,
        &tables.k_begin, &tables.batch_index, &tables.page_table, &tables.q_offset}) {
    visit(&each->data);
  }
}

template <class Visit>
void visit_addresses(AttentionBackwardProblem* p, const Visit& visit) {
  visit_addresses(static_cast<AttentionProblem*>(p), visit);
  visit(&p->dout.data);
  visit(&p->dlse);
  visit(&p->dq.data);
  visit(&p->dk.data);
  visit(&p->dv.data);
  visit(&p->dsinks.data);
}

}  // namespace flashmoe
