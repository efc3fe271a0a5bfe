#include "cuda/attention/tensor_map.h"

#include <algorithm>

#include "core/gpu_model.h"
#include "cuda/runtime.h"

namespace flashmoe {
namespace {

// The driver is not linked: this one function of it is asked for.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_function() {
  static const auto function =
      reinterpret_cast<EncodeTiled>(driver_function("cuTensorMapEncodeTiled"));
  return function;
}

// Whether the copy engine can walk a view: strides above 0 and below 2^40 bytes, or 0 for batches and
// heads, whose map then holds one.
bool can_walk(const RowStrides& strides, int64_t batch, int64_t seq, int64_t heads) {
  const auto fits = [](int64_t stride, int64_t extent, int64_t least) {
    return extent <= 1 || (stride >= least && stride < kMaxStrideBytes / 2);
  };
  return fits(strides.batch, batch, 0) && fits(strides.seq, seq, 1) && fits(strides.head, heads, 0);
}

bool same(const RowStrides& a, const RowStrides& b) {
  return a.batch == b.batch && a.seq == b.seq && a.head == b.head;
}

}  // namespace

flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason) {
  const bool empty = problem.batch == 0 || problem.seq_q == 0;  // and strides are 0 then
  if (!empty && (!can_walk(problem.q_strides, problem.batch, problem.seq_q, problem.heads_q) ||
                 !can_walk(problem.k_strides, problem.batch, problem.seq_k, problem.heads_kv) ||
                 !can_walk(problem.v_strides, problem.batch, problem.seq_k, problem.heads_kv) ||
                 !can_walk(problem.out_strides, problem.batch, problem.seq_q, problem.heads_q))) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "a stride that is negative, 2^40 bytes or more, or 0 along the sequence, which the copy "
        "engine cannot walk");
  }
  if (!is_gpu_model(problem.device.device_id) && encode_function() == nullptr) {
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

bool encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape& shape) {
  cuuint64_t extents[5] = {};
  cuuint64_t steps[4] = {};
  cuuint32_t box[5] = {};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    // No rows: nothing is read, but a map of nothing is refused.
    const bool one = shape.extents[i] <= 1 || shape.strides[i] == 0;
    extents[i] = one ? 1 : static_cast<cuuint64_t>(shape.extents[i]);
    // A step that is never taken: any will do.
    if (i > 0) steps[i - 1] = one ? 16 : static_cast<cuuint64_t>(2 * shape.strides[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
  }
  return encode_function()(map,
                           dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           static_cast<cuuint32_t>(shape.rank), const_cast<void*>(data), extents,
                           steps, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_context(int device_id) {
  if (cudaSetDevice(device_id) == cudaSuccess) return true;
  cudaGetLastError();  // nothing is left behind for the next
  return false;
}

bool same_parameters(const AttentionProblem& a, const AttentionProblem& b) {
  return a.q == b.q && a.k == b.k && a.v == b.v && a.out == b.out && a.lse == b.lse &&
         a.dtype == b.dtype && a.device.device_id == b.device.device_id && a.batch == b.batch &&
         a.seq_q == b.seq_q && a.seq_k == b.seq_k && a.heads_q == b.heads_q &&
         a.heads_kv == b.heads_kv && a.dim == b.dim && a.dim_v == b.dim_v && a.scale == b.scale &&
         a.softcap == b.softcap && a.bounded_left == b.bounded_left &&
         a.bounded_right == b.bounded_right && a.left_offset == b.left_offset &&
         a.right_offset == b.right_offset && same(a.q_strides, b.q_strides) &&
         same(a.k_strides, b.k_strides) && same(a.v_strides, b.v_strides) &&
         same(a.out_strides, b.out_strides) && same(a.lse_strides, b.lse_strides);
}

}  // namespace flashmoe
