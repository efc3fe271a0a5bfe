// The problem of gathering keys and values of a cache: the C ABI's arguments after validation,
// which every backend takes. A plain struct; see docs/architecture.md for the flow.
#pragma once

#include <cstdint>

#include "core/ops/attention/append_problem.h"

namespace flashmoe {

// A validated call. Every extent and every reachable byte offset fits in int64; all but the head
// dimensions may be 0. Both results have one dtype, and both caches have it or fp8. v and v_cache
// are present together; without them dim_v is 0.
//
// `batch` counts sequences. k and v have `batch` rows of the batch, or with cu_seqlens_k one, of
// `seq` rows each.
struct KvGatherProblem {
  flashmoe_device device;

  RowsView<const void> k_cache;  // [batch_cache, rows_cache, heads_kv, dim]
  RowsView<const void> v_cache;  // [batch_cache, rows_cache, heads_kv, dim_v] or absent
  RowsView<void> k;              // [batch, seq, heads_kv, dim]
  RowsView<void> v;              // [batch, seq, heads_kv, dim_v] or absent

  int64_t batch;
  int64_t seq;
  int64_t heads_kv;
  int64_t dim;
  int64_t dim_v;
  int64_t batch_cache;  // rows of the batch, or pages
  int64_t rows_cache;   // of each, or the page size

  Numbers cu_seqlens_k;
  Numbers seqused_k;
  Numbers k_begin;
  Numbers batch_index;
  Numbers page_table;
  int64_t page_step;   // elements between page numbers of a sequence
  int64_t page_count;  // pages per sequence in the table
  KeyScales k_scale;   // for fp8 caches
  KeyScales v_scale;

  KernelName kernel;  // the kernel or family that the call asks for, or ""
};

template <class Visit>
void visit_addresses(KvGatherProblem* p, const Visit& visit) {
  visit(&p->k_cache.data);
  visit(&p->v_cache.data);
  visit(&p->k.data);
  visit(&p->v.data);
  for (Numbers* each :
       {&p->cu_seqlens_k, &p->seqused_k, &p->k_begin, &p->batch_index, &p->page_table}) {
    visit(&each->data);
  }
  visit(&p->k_scale.data);
  visit(&p->v_scale.data);
}

}  // namespace flashmoe
