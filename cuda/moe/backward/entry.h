// The kernels of the stages that go row by row, as the host sees them: of each the one for fp16,
// then that for bf16.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/moe/backward/params.h"

namespace flashmoe::moe_backward {

extern const Kernel rows_kernels[2];
extern const Kernel combine_kernels[2];
extern const Kernel sums_kernels[2];
extern const Kernel zeros_kernel_entry;

inline const Kernel& kernel_for(const Kernel (&kernels)[2], Dtype dtype) {
  return kernels[dtype == Dtype::kFloat16 ? 0 : 1];
}

}  // namespace flashmoe::moe_backward
