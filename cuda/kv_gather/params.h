// Arguments of the kernel that gathers keys and values of a cache, as the device sees them. Strides
// of rows are bytes, those of integers are elements.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "cuda/rows/rows.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::kv_gather {

using rows::Rows;
using rows::Scales;

// The two kinds of rows.
enum Stream : int { kKeys, kValues, kStreams };

// A unit is what a thread moves at a time: 16 bytes of a head of the results.
struct Params {
  Rows from[kStreams];
  Rows to[kStreams];
  Scales scales[kStreams];
  TableNumbers cu_seqlens_k;
  TableNumbers seqused_k;
  TableNumbers k_begin;
  TableNumbers batch_index;
  TableNumbers page_table;
  int64_t page_step;
  int64_t batch_cache;
  int32_t room;  // upper bound on the keys of a sequence
  Divisor page_size;

  int32_t sequences;
  int32_t rows;  // of all results: a packed batch's, or sequences * rows_of_batch
  Divisor rows_of_batch;
  Divisor units[kStreams];  // per head
  int32_t end_of_keys;      // end of the keys among a row's units
  Divisor row_units;
  int32_t block_rows;
  int32_t block_units;  // units of those rows per block
};

}  // namespace flashmoe::kv_gather
