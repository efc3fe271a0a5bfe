#include "cuda/kv_append/append.cuh"

#include "cuda/kv_append/entry.h"

namespace flashmoe::kv_append {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_KV_APPEND(index, name, dtype, element, heads)                                   \
  {{"kv_append_sm89_" name, reinterpret_cast<const void*>(&kv_append_kernel<element, heads>), 0, \
    loaded[index]},                                                                              \
   dtype,                                                                                        \
   heads}

const Entry entries[kEntries] = {
    FLASHMOE_KV_APPEND(0, "fp16", Dtype::kFloat16, __half, 4),
    FLASHMOE_KV_APPEND(1, "bf16", Dtype::kBFloat16, __nv_bfloat16, 4),
    FLASHMOE_KV_APPEND(2, "fp32", Dtype::kFloat32, float, 4),
    FLASHMOE_KV_APPEND(3, "fp16", Dtype::kFloat16, __half, 2),
    FLASHMOE_KV_APPEND(4, "bf16", Dtype::kBFloat16, __nv_bfloat16, 2),
    FLASHMOE_KV_APPEND(5, "fp32", Dtype::kFloat32, float, 2),
    FLASHMOE_KV_APPEND(6, "fp16", Dtype::kFloat16, __half, 1),
    FLASHMOE_KV_APPEND(7, "bf16", Dtype::kBFloat16, __nv_bfloat16, 1),
    FLASHMOE_KV_APPEND(8, "fp32", Dtype::kFloat32, float, 1),
};

#undef FLASHMOE_KV_APPEND

}  // namespace flashmoe::kv_append
