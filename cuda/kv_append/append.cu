#include "cuda/kv_append/append.cuh"

#include "cuda/kv_append/entry.h"

namespace flashmoe::kv_append {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_KV_APPEND(index, name, dtype, element)                                   \
  {{"kv_append_sm89_" name, reinterpret_cast<const void*>(&kv_append_kernel<element>), 0, \
    loaded[index]},                                                                       \
   dtype}

const Entry entries[kEntries] = {
    FLASHMOE_KV_APPEND(0, "fp16", Dtype::kFloat16, __half),
    FLASHMOE_KV_APPEND(1, "bf16", Dtype::kBFloat16, __nv_bfloat16),
    FLASHMOE_KV_APPEND(2, "fp32", Dtype::kFloat32, float),
};

#undef FLASHMOE_KV_APPEND

}  // namespace flashmoe::kv_append
