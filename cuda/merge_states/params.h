// Arguments of the kernel that merges partial results of attention, as the device sees them.
// Strides of rows are bytes, those of numbers elements.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "cuda/rows/rows.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::merge_states {

using rows::Rows;

// One number per row, such as its log-sum-exp. data is nullptr if it is absent.
struct RowFloats {
  float* data;
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// How the numbers of a row are stored.
enum Format : int32_t { kFp16, kBf16, kFp32 };

// Rows are counted in the order in which those of outs lie in memory: heads within tokens, or
// tokens within heads. A unit has kUnitNumbers numbers of a row.
struct Params {
  Rows outs;
  Rows prior_out;  // data is nullptr: absent
  Rows out;
  RowFloats lses;
  RowFloats prior_lse;  // present if prior_out is
  RowFloats lse;        // absent: not wanted
  int64_t outs_step;    // from one partial to the next
  int64_t lses_step;
  int32_t partials;  // partials in outs
  Format prior_format;
  Format out_format;

  int32_t rows;
  Divisor inner;  // heads of a token, or tokens of a head
  Divisor outer;  // the other dimension
  int32_t heads_inside;
  Divisor row_units;
  int32_t half_row;  // numbers
  int32_t block_rows;
  int32_t kept;  // partials of outs whose weights a block keeps; it makes those of others again
  int32_t threads_log2;  // log2 of the threads that make a row's weights

  // The tokens that exist. Others are neither read nor written. Without tables all exist.
  TableNumbers cu_seqlens_q;  // heads are the inner dimension, and the batch is one row
  TableNumbers seqused_q;
  int32_t sequences;
  int32_t most_q;  // tokens of a sequence; 0: no sequences
  int32_t seq;     // tokens of a row of the batch
};

}  // namespace flashmoe::merge_states
