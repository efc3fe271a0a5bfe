#include "cuda/moe/combine/combine.cuh"

#include "cuda/moe/combine/entry.h"

namespace flashmoe::moe_combine {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_COMBINE(index, dtype, element, batch)                                     \
  {{"moe_combine_" dtype "_k" #batch,                                                      \
    reinterpret_cast<const void*>(&moe_combine_kernel<element, batch>), 0, loaded[index]}, \
   numeric::ElementTraits<element>::kDtype,                                                \
   batch}

const Entry entries[kEntries] = {
    FLASHMOE_COMBINE(0, "fp16", __half, 2),        FLASHMOE_COMBINE(1, "fp16", __half, 4),
    FLASHMOE_COMBINE(2, "fp16", __half, 8),        FLASHMOE_COMBINE(3, "bf16", __nv_bfloat16, 2),
    FLASHMOE_COMBINE(4, "bf16", __nv_bfloat16, 4), FLASHMOE_COMBINE(5, "bf16", __nv_bfloat16, 8),
};

#undef FLASHMOE_COMBINE

}  // namespace flashmoe::moe_combine
