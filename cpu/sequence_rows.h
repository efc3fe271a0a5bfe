// The rows of one sequence of flashmoe_attention_sequences and its dense problem, for forward and
// backward. No number of the tables leads outside a tensor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe::cpu {

// Rows [begin, begin + count).
struct Range {
  int64_t begin;
  int64_t count;

  int64_t end() const { return begin + count; }
};

struct SequenceRows {
  int64_t sequence;
  int64_t batch_q;  // batch row of its queries
  int64_t batch_k;
  Range queries;
  Range keys;         // with pages, as if the table's pages were contiguous
  int64_t first_key;  // first of `keys`, counted from the sequence's first row
};

// The rows that `offsets` give sequence b, within `rows` rows.
inline Range packed_range(const Numbers& offsets, int64_t b, int64_t rows) {
  const int64_t begin = std::clamp<int64_t>(offsets.at(b), 0, rows);
  return {begin, std::clamp<int64_t>(offsets.at(b + 1), begin, rows) - begin};
}

// The room of sequence b: the rows before its lengths apply.
inline Range room_of_queries(const SequenceTables& tables, int64_t b) {
  if (tables.cu_seqlens_q.data == nullptr) return {0, tables.rows_q};
  return packed_range(tables.cu_seqlens_q, b, tables.rows_q);
}
inline Range room_of_keys(const SequenceTables& tables, int64_t b) {
  if (tables.paged) return {0, tables.page_count * tables.rows_k};
  if (tables.cu_seqlens_k.data == nullptr) return {0, tables.rows_k};
  return packed_range(tables.cu_seqlens_k, b, tables.rows_k);
}

inline void cut_at_end(const Numbers& used, int64_t b, Range* range) {
  if (used.data != nullptr) range->count = std::clamp<int64_t>(used.at(b), 0, range->count);
}

inline Range queries_of(const AttentionProblem& p, int64_t b) {
  Range queries = room_of_queries(p.sequences, b);
  cut_at_end(p.sequences.seqused_q, b, &queries);
  queries.count = std::min(queries.count, p.seq_q);
  return queries;
}

inline Range keys_of(const AttentionProblem& p, int64_t b) {
  const SequenceTables& tables = p.sequences;
  Range keys = room_of_keys(tables, b);
  keys.count = std::min(keys.count, tables.pair_keys);
  cut_at_end(tables.seqused_k, b, &keys);
  if (tables.k_begin.data != nullptr) {
    const int64_t skipped = std::clamp<int64_t>(tables.k_begin.at(b), 0, keys.count);
    keys.begin += skipped;
    keys.count -= skipped;
  }
  keys.count = std::min(keys.count, p.seq_k);
  return keys;
}

// A sequence without queries gets no keys.
inline SequenceRows rows_of_sequence(const AttentionProblem& p, int64_t b) {
  const SequenceTables& tables = p.sequences;
  SequenceRows rows = {b, tables.cu_seqlens_q.data != nullptr ? 0 : b, 0, queries_of(p, b), {0, 0},
                       0};
  if (rows.queries.count == 0) return rows;
  if (tables.batch_index.data != nullptr) {
    rows.batch_k = tables.batch_index.at(b);
    if (rows.batch_k < 0 || rows.batch_k >= tables.batch_k) return rows;
  } else if (!tables.paged && tables.cu_seqlens_k.data == nullptr) {
    rows.batch_k = b;
  }
  rows.keys = keys_of(p, b);
  rows.first_key = rows.keys.begin - room_of_keys(tables, b).begin;
  return rows;
}

// The address of an existing row. In bytes, as no dtype is known here.
template <class Data>
Data* address_of_row(Data* data, const RowStrides& strides, int64_t bytes, int64_t batch,
                     int64_t row) {
  const int64_t elements = batch * strides.batch + row * strides.seq;
  return reinterpret_cast<Data*>(reinterpret_cast<uintptr_t>(data) +
                                 static_cast<uintptr_t>(elements * bytes));
}

template <class Data>
void move_to_row(RowsView<Data>* view, int64_t batch, int64_t row) {
  view->data = address_of_row(view->data, view->strides, dtype_bytes(view->dtype), batch, row);
}

inline void move_to_pairs(PairsView* view, int64_t bytes, const SequenceRows& rows) {
  if (view->data == nullptr) return;
  const int64_t elements = rows.sequence * view->batch_stride + rows.first_key * view->key_stride;
  view->data = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(view->data) +
                                             static_cast<uintptr_t>(elements * bytes));
}

// Narrows the problem of all sequences to the dense problem of this one.
inline void narrow_to(const SequenceRows& rows, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  p.batch = 1;
  p.seq_q = rows.queries.count;
  p.seq_k = rows.keys.count;
  const Numbers& offsets = p.sequences.q_offset;
  if (offsets.data != nullptr) {
    set_bounds_at(offsets.at(rows.sequence), p.sequences.mask, &p);
  } else {
    set_bounds(p.sequences.mask, &p);
  }
  if (p.seq_q > 0) {
    move_to_row(&p.q, rows.batch_q, rows.queries.begin);
    move_to_row(&p.out, rows.batch_q, rows.queries.begin);
    const int64_t bytes = p.q.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
    if (p.lse != nullptr) {
      p.lse = address_of_row(p.lse, p.lse_strides, bytes, rows.batch_q, rows.queries.begin);
    }
  }
  if (p.seq_q > 0 && p.seq_k > 0) {
    move_to_pairs(&p.bias, dtype_bytes(p.bias.dtype), rows);
    move_to_pairs(&p.mask, 1, rows);
  }
  if (p.seq_k > 0 && !p.sequences.paged) {
    move_to_row(&p.k, rows.batch_k, rows.keys.begin);
    move_to_row(&p.v, rows.batch_k, rows.keys.begin);
    for (KeyScales* each : {&p.k_scale, &p.v_scale}) {
      if (each->data != nullptr) each->data = each->at(rows.batch_k, 0);
    }
  }
}

// The same with the gradients. An absent gradient keeps its null pointer.
inline void narrow_to(const SequenceRows& rows, AttentionBackwardProblem* problem) {
  AttentionBackwardProblem& p = *problem;
  narrow_to(rows, static_cast<AttentionProblem*>(problem));
  if (p.seq_q > 0) {
    move_to_row(&p.dout, rows.batch_q, rows.queries.begin);
    if (p.dq.data != nullptr) move_to_row(&p.dq, rows.batch_q, rows.queries.begin);
    const int64_t bytes = p.q.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
    if (p.dlse != nullptr) {
      p.dlse = address_of_row(p.dlse, p.dlse_strides, bytes, rows.batch_q, rows.queries.begin);
    }
  }
  if (p.seq_k == 0) return;
  for (RowsView<void>* gradient : {&p.dk, &p.dv}) {
    if (gradient->data != nullptr) move_to_row(gradient, rows.batch_k, rows.keys.begin);
  }
}

}  // namespace flashmoe::cpu
