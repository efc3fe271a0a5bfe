// What the attention families whose kernels load by the copy engine share on the host: which views
// it can walk, and the maps of rows.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/tensor_map.h"

namespace flashmoe {

// First and second extents of the tensors of a problem, those of q and out and those of k and v.
struct TensorRows {
  int64_t batch_q;
  int64_t rows_q;
  int64_t batch_k;
  int64_t rows_k;
};
TensorRows tensor_rows(const AttentionProblem& problem);

// Whether the copy engine can walk the views of a problem, and the driver can tell it of them.
flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason);
// The same of the views of a backward problem that are there. Not of out, nor of gradients that are
// added to or of fp32: kernels do not walk these so.
flashmoe_status check_walkable(const AttentionBackwardProblem& problem, const Reason& reason);

// Of a [batch, seq, heads, dim] view in boxes of so many columns and rows of one head.
MapShape rows_map(const RowStrides& strides, int64_t dim, int64_t seq, int64_t heads, int64_t batch,
                  int columns, int rows);

}  // namespace flashmoe
