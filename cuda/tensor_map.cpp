#include "cuda/tensor_map.h"

#include "core/gpu_model.h"
#include "cuda/runtime.h"

namespace flashmoe {
namespace {

// The driver is not linked. This asks it for its functions.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_function() {
  static const auto function =
      reinterpret_cast<EncodeTiled>(driver_function("cuTensorMapEncodeTiled"));
  return function;
}

using ReplaceAddress = decltype(&cuTensorMapReplaceAddress);

ReplaceAddress replace_function() {
  static const auto function =
      reinterpret_cast<ReplaceAddress>(driver_function("cuTensorMapReplaceAddress"));
  return function;
}

}  // namespace

flashmoe_status check_tensor_maps(int device_id, const Reason& reason) {
  if (is_gpu_model(device_id) || encode_function() != nullptr) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "the driver offers no cuTensorMapEncodeTiled");
}

bool encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape& shape) {
  cuuint64_t extents[5] = {};
  cuuint64_t steps[4] = {};
  cuuint32_t box[5] = {};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    // Nothing is read without rows, but the driver refuses an empty map.
    const bool one = shape.extents[i] <= 1 || shape.strides[i] == 0;
    extents[i] = one ? 1 : static_cast<cuuint64_t>(shape.extents[i]);
    // No load takes this step, so any value will do.
    if (i > 0)
      steps[i - 1] = one ? 16 : static_cast<cuuint64_t>(dtype_bytes(dtype) * shape.strides[i]);
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

bool move_map(CUtensorMap* map, const void** mapped, const void* data) {
  if (*mapped == data) return true;
  if (replace_function() == nullptr ||
      replace_function()(map, const_cast<void*>(data)) != CUDA_SUCCESS) {
    return false;
  }
  *mapped = data;
  return true;
}

bool make_context(int device_id) {
  if (cudaSetDevice(device_id) == cudaSuccess) return true;
  cudaGetLastError();  // clears the error for the next caller
  return false;
}

}  // namespace flashmoe
