#include "cuda/kv_append/append.cuh"

#include "cuda/kv_append/entry.h"

namespace flashmoe::kv_append {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_KV_APPEND(index, name, dtype, kernel, turn, packed)                   \
  {{"kv_append_sm89_" name, reinterpret_cast<const void*>(&kernel), 0, loaded[index]}, \
   dtype,                                                                              \
   turn,                                                                               \
   packed}

// The kernels of one dtype and one kind of rotation.
#define FLASHMOE_KV_APPENDS(index, name, dtype, element, turn)                            \
  FLASHMOE_KV_APPEND(index, name, dtype, (kv_append_kernel<element, turn>), turn, false), \
      FLASHMOE_KV_APPEND((index) + 1, "packed_" name, dtype,                              \
                         (kv_append_packed_kernel<element, turn>), turn, true)

#define FLASHMOE_KV_APPENDS_OF(index, name, dtype, element)                      \
  FLASHMOE_KV_APPENDS(index, name, dtype, element, Turn::kNone),                 \
      FLASHMOE_KV_APPENDS((index) + 2, name, dtype, element, Turn::kHalves),     \
      FLASHMOE_KV_APPENDS((index) + 4, name, dtype, element, Turn::kNeighbours), \
      FLASHMOE_KV_APPENDS((index) + 6, name, dtype, element, Turn::kNumbers)

const Entry entries[kEntries] = {
    FLASHMOE_KV_APPENDS_OF(0, "fp16", Dtype::kFloat16, __half),
    FLASHMOE_KV_APPENDS_OF(8, "bf16", Dtype::kBFloat16, __nv_bfloat16),
    FLASHMOE_KV_APPENDS_OF(16, "fp32", Dtype::kFloat32, float),
};

#undef FLASHMOE_KV_APPENDS_OF
#undef FLASHMOE_KV_APPENDS
#undef FLASHMOE_KV_APPEND

}  // namespace flashmoe::kv_append
