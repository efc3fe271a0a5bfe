// Arguments of the kernel that appends to a cache, as the device sees them. Strides of rows and of
// tables of cosines are bytes, those of integers are elements.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "cuda/rows/rows.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::kv_append {

using rows::Rows;
using rows::Scales;

// The three kinds of rows.
enum Stream : int { kKeys, kValues, kQueries, kStreams };

// [batch, seq] integers. data is nullptr if they are absent.
struct Tokens {
  const void* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int32_t wide;  // int64, otherwise int32
  int32_t gap;
};

// Division by any number of rows.
struct RowDivisor {
  int64_t value;
  Divisor by;    // for numbers below 2^31
  int32_t fits;  // value is below 2^31, too
};

struct Rotary {
  const char* cos;
  const char* sin;
  int64_t cos_stride;  // from one position to the next
  int64_t sin_stride;
  int64_t rows;     // positions in the tables
  int32_t pairs;    // per head; 0: no rotation
  int32_t wide;     // tables are fp32, otherwise of the rows' dtype
  int32_t vectors;  // both tables can be loaded in pieces
  int32_t q_stays;
};

// A unit is what a thread moves at a time. It has two pieces of 16 bytes for each of unit_heads
// heads: one piece per half if halves are rotated against each other. If halves are no whole
// pieces, it has a pair of numbers.
struct Params {
  Rows from[kStreams];
  Rows to[kStreams];
  Tokens slots;
  Tokens positions;
  TableNumbers cache_seqlens;
  TableNumbers cu_seqlens;
  TableNumbers seqused;
  TableNumbers batch_index;
  TableNumbers page_table;
  int64_t page_step;
  int64_t page_count;
  int64_t batch_cache;
  RowDivisor rows_cache;
  Rotary rotary;
  Scales scales[2];  // of keys and of values
  int32_t fp8;       // caches are fp8, otherwise of the rows' type

  int32_t sequences;
  int32_t rows;   // over all sequences: a packed batch's, or batch * rows_of_batch
  int32_t seq;    // of k
  int32_t seq_q;  // of q
  Divisor rows_of_batch;

  int32_t heads[kStreams];
  int32_t pieces[kStreams];  // per head
  int32_t unit_heads;
  Divisor units[kStreams];  // per group of unit_heads heads
  int32_t ends[kStreams];   // of a row's units: the end of each stream
  Divisor row_units;
  int32_t block_rows;
  int32_t block_units;  // units of those rows per block
};

}  // namespace flashmoe::kv_append
