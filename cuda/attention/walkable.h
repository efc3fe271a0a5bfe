// What attention families with TMA loads share on the host: which views the copy engine can walk,
// and maps of rows.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/tensor_map.h"

namespace flashmoe {

// First and second extents of the tensors of a problem: those of q and out, and those of k and v.
struct TensorRows {
  int64_t batch_q;
  int64_t rows_q;
  int64_t batch_k;
  int64_t rows_k;
};
TensorRows tensor_rows(const AttentionProblem& problem);

// Whether the copy engine can walk the views of a problem, and the driver can encode their maps.
flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason);
// The same for the given views of a backward problem. It skips out, gradients that are accumulated,
// and fp32 gradients: the copy engine does not access these.
flashmoe_status check_walkable(const AttentionBackwardProblem& problem, const Reason& reason);

// Map of a [batch, seq, heads, dim] view in boxes of so many columns and rows of one head.
MapShape rows_map(const RowStrides& strides, int64_t dim, int64_t seq, int64_t heads, int64_t batch,
                  int columns, int rows);

}  // namespace flashmoe
