#include "cuda/attention/walkable.h"

#include <algorithm>

#include "core/gpu_model.h"
#include "cuda/runtime.h"

namespace flashmoe {
namespace {

// Whether the copy engine can walk a view: strides above 0 and below 2^40 bytes, or 0 for batches and
// heads, whose map then holds one.
bool can_walk(const RowStrides& strides, int64_t batch, int64_t seq, int64_t heads,
              int64_t element_bytes) {
  const auto fits = [=](int64_t stride, int64_t extent, int64_t least) {
    return extent <= 1 || (stride >= least && stride < kMaxStrideBytes / element_bytes);
  };
  return fits(strides.batch, batch, 0) && fits(strides.seq, seq, 1) && fits(strides.head, heads, 0);
}

}  // namespace

flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason) {
  const int64_t bytes = dtype_bytes(problem.dtype);
  const bool empty = problem.batch == 0 || problem.seq_q == 0;  // and strides are 0 then
  if (!empty &&
      (!can_walk(problem.q_strides, problem.batch, problem.seq_q, problem.heads_q, bytes) ||
       !can_walk(problem.k_strides, problem.batch, problem.seq_k, problem.heads_kv, bytes) ||
       !can_walk(problem.v_strides, problem.batch, problem.seq_k, problem.heads_kv, bytes) ||
       !can_walk(problem.out_strides, problem.batch, problem.seq_q, problem.heads_q, bytes))) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "a stride that is negative, 2^40 bytes or more, or 0 along the sequence, which the copy "
        "engine cannot walk");
  }
  if (!is_gpu_model(problem.device.device_id) && !has_tensor_maps()) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "the driver offers no cuTensorMapEncodeTiled");
  }
  return FLASHMOE_OK;
}

MapShape rows_map(const RowStrides& strides, int64_t dim, int64_t seq, int64_t heads, int64_t batch,
                  int columns, int rows) {
  return {4,
          {dim, seq, heads, batch},
          {1, strides.seq, strides.head, strides.batch},
          {columns, rows, 1, 1}};
}

}  // namespace flashmoe
