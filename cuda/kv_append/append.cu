#include "cuda/kv_append/append.cuh"

#include "cuda/kv_append/entry.h"

namespace flashmoe::kv_append {

static LoadedKernel loaded[kEntries][kMaxDevices];

const Entry entries[kEntries] = {
    {{"kv_append_sm89_fp16", reinterpret_cast<const void*>(&kv_append_kernel<__half>), 0,
      loaded[0]},
     Dtype::kFloat16},
    {{"kv_append_sm89_bf16", reinterpret_cast<const void*>(&kv_append_kernel<__nv_bfloat16>), 0,
      loaded[1]},
     Dtype::kBFloat16},
    {{"kv_append_sm89_fp32", reinterpret_cast<const void*>(&kv_append_kernel<float>), 0, loaded[2]},
     Dtype::kFloat32},
};

}  // namespace flashmoe::kv_append
