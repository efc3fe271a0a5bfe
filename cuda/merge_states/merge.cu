#include "cuda/merge_states/merge.cuh"

#include "cuda/merge_states/entry.h"

namespace flashmoe::merge_states {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define FLASHMOE_MERGE_STATES(index, name, dtype, element, halves)                           \
  {{"merge_states_sm89_" name,                                                               \
    reinterpret_cast<const void*>(&merge_states_kernel<element, halves>), 0, loaded[index]}, \
   dtype,                                                                                    \
   halves}

const Entry entries[kEntries] = {
    FLASHMOE_MERGE_STATES(0, "fp16", Dtype::kFloat16, __half, false),
    FLASHMOE_MERGE_STATES(1, "bf16", Dtype::kBFloat16, __nv_bfloat16, false),
    FLASHMOE_MERGE_STATES(2, "fp16_beside_fp32", Dtype::kFloat16, __half, true),
    FLASHMOE_MERGE_STATES(3, "bf16_beside_fp32", Dtype::kBFloat16, __nv_bfloat16, true),
    FLASHMOE_MERGE_STATES(4, "fp32", Dtype::kFloat32, float, true),
};

#undef FLASHMOE_MERGE_STATES

}  // namespace flashmoe::merge_states
