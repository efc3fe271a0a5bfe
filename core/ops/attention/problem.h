// The attention problems: the C ABI's arguments after validation, which every backend takes. Plain
// structs; see docs/architecture.md for the flow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/dtype.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int64_t kMaxHeadDim = 576;
inline constexpr int64_t kMaxHeadDimV = 512;
// The limit for calls with gradients, and for most families' kernels.
inline constexpr int64_t kMaxGradientHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;

// Element strides of a [batch, seq, heads, dim] view; the last one is 1.
struct RowStrides {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// A [batch, seq, heads, dim] view with its own dtype.
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
  int64_t batch_stride;  // elements; 0 if one scale serves all rows of the batch, or all pages
  int64_t head_stride;

  const float* at(int64_t batch, int64_t head) const {
    return static_cast<const float*>(data) + batch * batch_stride + head * head_stride;
  }
};

// [batch, heads_q, seq_q, seq_k] with its own dtype; data is nullptr: absent. Broadcast axes have
// strides of 0. With sequences it has at least as many queries as seq_q, and as many keys as
// pair_keys, counted from the first row of keys of each sequence, whatever k_begin is.
struct PairsView {
  const void* data;
  int64_t batch_stride;  // elements
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;
  Dtype dtype;  // of a bias; masks have bytes
  int32_t gap;
};

// The caller's limits on the keys that a query sees. Together with the lengths they give bounds.
struct AttentionMask {
  int32_t causal;   // flashmoe_causal
  uint32_t window;  // bits of flashmoe_window
  int64_t window_left;
  int64_t window_right;
};

// Where the queries and keys of each sequence are: flashmoe_attention_sequences. All zeros for a
// dense batch.
struct SequenceTables {
  Numbers cu_seqlens_q;
  Numbers cu_seqlens_k;
  Numbers seqused_q;
  Numbers seqused_k;
  Numbers k_begin;
  Numbers batch_index;
  Numbers page_table;
  Numbers q_offset;
  int64_t page_step;   // elements between page numbers of a sequence
  int64_t page_count;  // pages per sequence in the table
  int64_t rows_q;      // second extent of q: clamps offsets and lengths
  int64_t batch_k;     // first extent of k and v; with a page table their pages
  int64_t rows_k;      // second extent; with a page table the page size
  int64_t split_size;  // keys per chunk, the only thing that bits may depend on; 0: bits may depend
                       // on the batch
  int64_t pair_keys;   // the most rows of keys of a sequence: those of a bias or a mask
  AttentionMask mask;
  bool given;
  bool paged;
};

// A validated call. Every extent and every reachable byte offset fits in int64; batch, seq_q and
// seq_k may be 0; dim and dim_v are multiples of kHeadDimMultiple up to kMaxHeadDim and
// kMaxHeadDimV, with gradients up to kMaxGradientHeadDim; heads_q % heads_kv == 0. The four views
// have one dtype, except that k and v may both be fp8. Sinks have that dtype or fp32.
//
// With sequences, `batch` is their number, seq_q and seq_k bound their lengths, and no bound of
// keys is set: each sequence becomes a problem of its own when the lengths are read
// (cpu/attention_sequences.h).
struct AttentionProblem {
  flashmoe_device device;

  RowsView<const void> q;  // [batch, seq_q, heads_q, dim]
  RowsView<const void> k;  // [batch, seq_k, heads_kv, dim]
  RowsView<const void> v;  // [batch, seq_k, heads_kv, dim_v]
  RowsView<void> out;      // [batch, seq_q, heads_q, dim_v]
  void* lse;               // [batch, heads_q, seq_q] or nullptr: fp32, with fp64 views fp64
  RowStrides lse_strides;  // same axes; element strides of lse, in which the last axis is seq
  HeadLogits sinks;        // absent: none
  KeyScales k_scale;       // factors of the numbers of k and v
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

  // Query i sees the keys j >= i + left_offset and j <= i + right_offset, for each end that is
  // bounded. A bound that hides no key of any row is not set. Offsets lie in [-seq_q, seq_k] and
  // are 0 at an unbounded end; if both ends are bounded, left_offset <= right_offset.
  bool bounded_left;
  bool bounded_right;
  // v is the first dim_v columns of k, in the same memory: reading k reads v.
  bool values_in_keys;
  int64_t left_offset;
  int64_t right_offset;

  SequenceTables sequences;

  // A key is hidden where the mask is 0 or the bias -inf.
  PairsView bias;
  PairsView mask;
};

// Whether k and v differ from q: they have 8 bits, or scales.
inline bool has_scaled_keys(const AttentionProblem& p) {
  return p.k.dtype != p.q.dtype || p.k_scale.data != nullptr || p.v_scale.data != nullptr;
}

// Sets the four fields above from seq_q and seq_k, which may be any number >= 0.
void set_bounds(const AttentionMask& mask, AttentionProblem* problem);
// The same when query 0 stands at this key, a 32-bit number.
void set_bounds_at(int64_t diagonal, const AttentionMask& mask, AttentionProblem* problem);

// [heads_q]; data is nullptr: not wanted.
struct HeadSums {
  void* data;
  int64_t stride;  // elements
  Dtype dtype;
  int32_t gap;
};

// A validated call for the gradients of such a call, whose out and lse are inputs here. Some
// gradients may be absent, but not all; each has its tensor's dtype or fp32. dsinks come with
// sinks.
struct AttentionBackwardProblem : AttentionProblem {
  RowsView<const void> dout;  // as out
  const void* dlse;           // as lse, or nullptr: 0
  RowStrides dlse_strides;
  RowsView<void> dq;  // as q
  RowsView<void> dk;  // as k
  RowsView<void> dv;  // as v
  HeadSums dsinks;
  bool accumulate;  // gradients are added to the outputs
};

// Multiply-adds of the two products count as two; pairs whose query does not see the key do not
// count.
double attention_flops(const AttentionProblem& problem);
// The same for the products that the wanted gradients need, at most five.
double attention_backward_flops(const AttentionBackwardProblem& problem);
// For plans: 0 if tables on the device say how long sequences are.
double planned_flops(const AttentionProblem& problem);
double planned_flops(const AttentionBackwardProblem& problem);

// Every table of lengths, offsets and page numbers.
template <class Tables, class Visit>
void visit_tables(Tables& tables, const Visit& visit) {
  for (auto* each :
       {&tables.cu_seqlens_q, &tables.cu_seqlens_k, &tables.seqused_q, &tables.seqused_k,
        &tables.k_begin, &tables.batch_index, &tables.page_table, &tables.q_offset}) {
    visit(each);
  }
}

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
  visit_tables(p->sequences, [&](Numbers* table) { visit(&table->data); });
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
