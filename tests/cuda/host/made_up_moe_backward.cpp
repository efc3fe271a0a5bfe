// Kernels of the gradients of layers and grouped products, of sm89 and sm90, without code.
#include "cuda/moe/backward/entry.h"
#include "cuda/moe/sm89_backward/entry.h"
#include "cuda/moe/sm90_backward/entry.h"

namespace flashmoe::moe_backward {

static LoadedKernel loaded[8][kMaxDevices];
static Kernel kernel_of(const char* name, int index) {
  return {name, reinterpret_cast<const void*>(intptr_t{0x400} + index), 0, loaded[index]};
}

const Kernel rows_kernels[2] = {kernel_of("rows_fp16", 0), kernel_of("rows_bf16", 1)};
const Kernel combine_kernels[2] = {kernel_of("combine_fp16", 2), kernel_of("combine_bf16", 3)};
const Kernel sums_kernels[2] = {kernel_of("sums_fp16", 4), kernel_of("sums_bf16", 5)};
const Kernel zeros_kernel_entry = kernel_of("zeros", 6);
const Kernel slots_kernel_entry = kernel_of("slots", 7);

}  // namespace flashmoe::moe_backward

namespace flashmoe::moe::sm89_backward {

static LoadedKernel loaded[kEntries][kMaxDevices];
static Entry entry_of(Dtype dtype, int index) {
  return {{"gradient", reinterpret_cast<const void*>(intptr_t{0x500} + index), 0, loaded[index]},
          dtype,
          128,
          128,
          3,
          256,
          1};
}
const Entry entries[kEntries] = {entry_of(Dtype::kFloat16, 0), entry_of(Dtype::kBFloat16, 1)};

}  // namespace flashmoe::moe::sm89_backward

namespace flashmoe::moe::sm90_backward {

static LoadedKernel loaded[kMaxDevices];
extern const Entry entry_bf16;
const Entry entry_bf16 = {{"gradient", reinterpret_cast<const void*>(0x600), 1024, loaded},
                          Dtype::kBFloat16,
                          128,
                          192,
                          64,
                          4,
                          384};

}  // namespace flashmoe::moe::sm90_backward
