// Ragged maps on the host (ragged_rows.h): which views can have one, and how it is made.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/attention/ragged_rows.h"
#include "cuda/tensor_map.h"

namespace flashmoe {

// The ragged map of a view (ragged_rows.h).
struct RaggedMap {
  MapShape shape;
  const void* data;
};

// The rows of a view as a ragged map counts them: those of its batch one after the other.
struct CountedRows {
  int64_t stride;
  int64_t per_batch;  // rows from one row of the batch to the next
  int64_t count;
};

struct StridesOfRows {
  int64_t row;
  int64_t batch;
};

// The stride of a single row may be anything. Then the rows of the batch count as the rows, if
// there are several.
template <class Data>
StridesOfRows strides_of_rows(const RowsView<Data>& view, int64_t batch, int64_t rows,
                              int columns) {
  const int64_t of_batch = batch > 1 ? view.strides.batch : 0;
  if (rows > 1) return {view.strides.seq, of_batch};
  return {of_batch > 0 ? of_batch : columns, of_batch};
}

// The view must have passed check_counted_rows.
template <class Data>
CountedRows counted_rows(const RowsView<Data>& view, int64_t batch, int64_t rows, int columns) {
  const auto [stride, batch_stride] = strides_of_rows(view, batch, rows, columns);
  const int64_t per_batch = batch_stride / stride;
  return {stride, per_batch, per_batch > 0 ? (batch - 1) * per_batch + rows : rows};
}

template <class Data>
flashmoe_status check_counted_rows(const char* name, const RowsView<Data>& view, int64_t batch,
                                   int64_t rows, int columns, const Reason& reason) {
  const auto [stride, batch_stride] = strides_of_rows(view, batch, rows, columns);
  const int64_t bytes = stride * dtype_bytes(view.dtype);
  if (bytes >= RaggedRow::kWrapBytes) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "rows of sequences in %s are %lld bytes apart, accepted are less than 2^34", name,
        static_cast<long long>(bytes));
  }
  if (batch_stride % stride != 0) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s has sequences with a stride of %lld along the batch, accepted are "
                         "multiples of that from row to row, %lld",
                         name, static_cast<long long>(batch_stride),
                         static_cast<long long>(stride));
  }
  const int64_t per_batch = batch_stride / stride;
  // `base` is below the end of its dimension, which fits in int32.
  constexpr int64_t kEnd = RaggedRow::kMost - 1;
  if (rows >= kEnd || (per_batch > 0 && batch - 1 > (kEnd - 1 - rows) / per_batch)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s has sequences in memory of 2^30 rows or more, accepted are fewer",
                         name);
  }
  return FLASHMOE_OK;
}

template <class Data>
RaggedMap ragged_map(const RowsView<Data>& view, int64_t dim, const CountedRows& rows,
                     int64_t heads, int columns, int box_rows) {
  constexpr int64_t kMost = RaggedRow::kMost;
  const int64_t wrap = RaggedRow::kWrapBytes / dtype_bytes(view.dtype) - rows.stride;
  return {{5,
           {dim, kMost, heads, kMost + rows.count, kMost + 1},
           {1, rows.stride, view.strides.head, rows.stride, wrap},
           {columns, box_rows, 1, 1, 1}},
          view.data};
}

}  // namespace flashmoe
