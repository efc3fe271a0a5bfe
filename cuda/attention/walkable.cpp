#include "cuda/attention/walkable.h"

#include <algorithm>

#include "core/gpu_model.h"
#include "cuda/runtime.h"

namespace flashmoe {
namespace {

// Whether the copy engine can walk a view: strides above 0 and below 2^40 bytes, or 0 for batches and
// heads, whose map then holds one.
template <class Data>
bool can_walk(const RowsView<Data>& view, int64_t batch, int64_t seq, int64_t heads) {
  const int64_t end = kMaxStrideBytes / dtype_bytes(view.dtype);
  const auto fits = [=](int64_t stride, int64_t extent, int64_t least) {
    return extent <= 1 || (stride >= least && stride < end);
  };
  return fits(view.strides.batch, batch, 0) && fits(view.strides.seq, seq, 1) &&
         fits(view.strides.head, heads, 0);
}

}  // namespace

flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason) {
  const bool empty = problem.batch == 0 || problem.seq_q == 0;  // and strides are 0 then
  if (!empty && (!can_walk(problem.q, problem.batch, problem.seq_q, problem.heads_q) ||
                 !can_walk(problem.k, problem.batch, problem.seq_k, problem.heads_kv) ||
                 !can_walk(problem.v, problem.batch, problem.seq_k, problem.heads_kv) ||
                 !can_walk(problem.out, problem.batch, problem.seq_q, problem.heads_q))) {
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
