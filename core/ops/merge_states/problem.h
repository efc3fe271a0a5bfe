// The problem of merging partial attention results: the C ABI's arguments after validation, which
// every backend takes. A plain struct; see docs/architecture.md for the flow.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

// [batch, heads, seq] numbers; data is nullptr: absent.
template <class Data>
struct RowNumbers {
  Data* data;
  RowStrides strides;
};

// A validated call. Every extent and every reachable byte offset fits in int64; all but dim_v may
// be 0. Numbers are fp32, or fp64 if all rows are. outs, prior_out and out each have their own
// dtype.
struct MergeStatesProblem {
  flashmoe_device device;

  int64_t partials;  // of outs and lses
  int64_t batch;
  int64_t seq;
  int64_t heads;
  int64_t dim_v;

  RowsView<const void> outs;    // [partials, batch, seq, heads, dim_v]
  RowNumbers<const void> lses;  // [partials, batch, heads, seq]
  int64_t outs_stride;          // elements between partials
  int64_t lses_stride;
  RowsView<const void> prior_out;    // [batch, seq, heads, dim_v] or absent: the first partial
  RowNumbers<const void> prior_lse;  // [batch, heads, seq]; present with prior_out
  RowsView<void> out;                // [batch, seq, heads, dim_v]
  RowNumbers<void> lse;              // [batch, heads, seq] or absent

  // For results of attention over sequences (core/ops/attention/merge_in.cpp): rows that belong to
  // no sequence are neither read nor written. `most_q` bounds the rows of a sequence; 0: no
  // sequences, and all rows count. With cu_seqlens_q, batch is 1.
  Numbers cu_seqlens_q;
  Numbers seqused_q;
  int64_t sequences;
  int64_t most_q;

  KernelName kernel;  // the kernel or family that the call asks for, or ""
};

template <class Visit>
void visit_addresses(MergeStatesProblem* p, const Visit& visit) {
  visit(&p->outs.data);
  visit(&p->lses.data);
  visit(&p->prior_out.data);
  visit(&p->prior_lse.data);
  visit(&p->out.data);
  visit(&p->lse.data);
  visit(&p->cu_seqlens_q.data);
  visit(&p->seqused_q.data);
}

}  // namespace flashmoe
