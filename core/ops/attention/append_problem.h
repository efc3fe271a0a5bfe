// The problem of appending to a cache of keys and values: the C ABI's arguments after validation,
// which every backend takes. A plain struct; see docs/architecture.md for the flow.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

inline constexpr int64_t kMostAppendedDim = 1024;

// [batch, seq] integers; data is nullptr: absent.
struct TokenNumbers {
  const void* data;
  int64_t batch_stride;  // elements
  int64_t seq_stride;
  bool wide;  // int64, else int32
  int8_t gap[7];

  int64_t at(int64_t b, int64_t i) const {
    const int64_t element = b * batch_stride + i * seq_stride;
    return wide ? static_cast<const int64_t*>(data)[element]
                : static_cast<const int32_t*>(data)[element];
  }
};

// [positions, dim / 2] cosines or sines, whose last stride is 1; data is nullptr: absent.
struct RotaryTable {
  const void* data;
  int64_t stride;  // elements from one position to the next
};

// How rows are rotated. Without rotation, rows and dim are 0.
struct Rotary {
  RotaryTable cos;
  RotaryTable sin;
  int64_t rows;  // positions in the tables
  int64_t dim;   // the first dim numbers of each head are rotated
  Dtype dtype;   // of both tables
  bool interleaved;
  bool q_stays;  // all queries of a sequence stand where its first does
  int8_t gap[2];
};

// A validated call. Every extent and every reachable byte offset fits in int64; all but the head
// dimensions may be 0. All rows have one dtype, except that both caches may be fp8. q and q_out are
// present together, and only with rotary.
//
// `batch` counts sequences. k and v have `batch` rows of the batch, or with cu_seqlens one, of
// `seq` rows each.
struct KvAppendProblem {
  flashmoe_device device;

  RowsView<const void> k;  // [batch, seq, heads_kv, dim]
  RowsView<const void> v;  // [batch, seq, heads_kv, dim_v]
  RowsView<void> k_cache;  // [batch_cache, rows_cache, heads_kv, dim]
  RowsView<void> v_cache;  // [batch_cache, rows_cache, heads_kv, dim_v]
  RowsView<const void> q;  // [batch, seq_q, heads_q, dim] or absent
  RowsView<void> q_out;

  int64_t batch;
  int64_t seq;
  int64_t seq_q;
  int64_t heads_kv;
  int64_t heads_q;
  int64_t dim;
  int64_t dim_v;
  int64_t batch_cache;  // rows of the batch, or pages
  int64_t rows_cache;   // of each, or the page size

  TokenNumbers slots;
  TokenNumbers positions;
  Numbers cache_seqlens;
  Numbers cu_seqlens;
  Numbers seqused;
  Numbers batch_index;
  Numbers page_table;
  int64_t page_step;   // elements between page numbers of a sequence
  int64_t page_count;  // pages per sequence in the table
  Rotary rotary;
  KeyScales k_scale;  // for fp8 caches
  KeyScales v_scale;

  KernelName kernel;  // the kernel or family that the call asks for, or ""
};

template <class Visit>
void visit_addresses(KvAppendProblem* p, const Visit& visit) {
  visit(&p->k.data);
  visit(&p->v.data);
  visit(&p->k_cache.data);
  visit(&p->v_cache.data);
  visit(&p->q.data);
  visit(&p->q_out.data);
  visit(&p->slots.data);
  visit(&p->positions.data);
  for (Numbers* each :
       {&p->cache_seqlens, &p->cu_seqlens, &p->seqused, &p->batch_index, &p->page_table}) {
    visit(&each->data);
  }
  visit(&p->rotary.cos.data);
  visit(&p->rotary.sin.data);
  visit(&p->k_scale.data);
  visit(&p->v_scale.data);
}

}  // namespace flashmoe
