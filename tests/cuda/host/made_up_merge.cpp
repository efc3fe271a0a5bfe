// Kernels of merging for the host side of its family, and no CPU beside it.
#include "core/backends.h"
#include "core/status.h"
#include "cuda/merge_states/entry.h"

namespace flashmoe::merge_states {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define ENTRY(index, name, dtype, halves)                                                      \
  {{"merge_states_sm89_" name, reinterpret_cast<const void*>(0x31 + index), 0, loaded[index]}, \
   dtype,                                                                                      \
   halves}
const Entry entries[kEntries] = {
    ENTRY(0, "fp16", Dtype::kFloat16, false),
    ENTRY(1, "bf16", Dtype::kBFloat16, false),
    ENTRY(2, "fp16_beside_fp32", Dtype::kFloat16, true),
    ENTRY(3, "bf16_beside_fp32", Dtype::kBFloat16, true),
    ENTRY(4, "fp32", Dtype::kFloat32, true),
};

}  // namespace flashmoe::merge_states

namespace flashmoe {

static flashmoe_status no_cpu(const MergeStatesProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
const MergeStatesFamily kCpuMergeStates = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};

}  // namespace flashmoe
