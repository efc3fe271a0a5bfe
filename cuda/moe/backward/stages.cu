#include "cuda/moe/backward/entry.h"
#include "cuda/moe/backward/rows.cuh"
#include "cuda/moe/backward/sums.cuh"

namespace flashmoe::moe_backward {

static LoadedKernel loaded[8][kMaxDevices];

#define FLASHMOE_STAGES(index, name, kernel)                                                       \
  {                                                                                                \
      {name "_fp16", reinterpret_cast<const void*>(&kernel<__half>), 0, loaded[index]},            \
      {name "_bf16", reinterpret_cast<const void*>(&kernel<__nv_bfloat16>), 0, loaded[index + 1]}, \
  }

const Kernel rows_kernels[2] = FLASHMOE_STAGES(0, "moe_backward_rows", rows_kernel);
const Kernel combine_kernels[2] = FLASHMOE_STAGES(2, "moe_backward_combine", combine_kernel);
const Kernel sums_kernels[2] = FLASHMOE_STAGES(4, "moe_backward_sums", sums_kernel);
const Kernel zeros_kernel_entry = {"moe_backward_zeros",
                                   reinterpret_cast<const void*>(&zeros_kernel), 0, loaded[6]};

const Kernel slots_kernel_entry = {"moe_backward_slots",
                                   reinterpret_cast<const void*>(&slots_kernel), 0, loaded[7]};

#undef FLASHMOE_STAGES

}  // namespace flashmoe::moe_backward
