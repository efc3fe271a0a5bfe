#include "cuda/kv_gather/gather.cuh"

#include "cuda/kv_gather/entry.h"

namespace flashmoe::kv_gather {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_KV_GATHER(index, name, dtype, element, fp8)                                   \
  {{"kv_gather_sm89_" name, reinterpret_cast<const void*>(&kv_gather_kernel<element, fp8>), 0, \
    loaded[index]},                                                                            \
   dtype,                                                                                      \
   fp8}

const Entry entries[kEntries] = {
    FLASHMOE_KV_GATHER(0, "fp16", Dtype::kFloat16, __half, false),
    FLASHMOE_KV_GATHER(1, "bf16", Dtype::kBFloat16, __nv_bfloat16, false),
    FLASHMOE_KV_GATHER(2, "fp32", Dtype::kFloat32, float, false),
    FLASHMOE_KV_GATHER(3, "fp16_fp8", Dtype::kFloat16, __half, true),
    FLASHMOE_KV_GATHER(4, "bf16_fp8", Dtype::kBFloat16, __nv_bfloat16, true),
    FLASHMOE_KV_GATHER(5, "fp32_fp8", Dtype::kFloat32, float, true),
};

#undef FLASHMOE_KV_GATHER

}  // namespace flashmoe::kv_gather
