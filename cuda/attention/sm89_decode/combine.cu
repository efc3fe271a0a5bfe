// The second kernel of decoding, one per element type.
#include "cuda/attention/decode/combine.cuh"

#include "cuda/attention/sm89_decode/entry.h"

namespace flashmoe::sm89_decode {

using attention_decode::attention_combine_kernel;

inline constexpr int kMostDimV = 256;

static LoadedKernel loaded_fp16[kMaxDevices];
static LoadedKernel loaded_bf16[kMaxDevices];

const Kernel kCombineFp16 = {
    "attention_combine_sm89_decode_fp16",
    reinterpret_cast<const void*>(&attention_combine_kernel<__half, kMostDimV>), 0, loaded_fp16};
const Kernel kCombineBf16 = {
    "attention_combine_sm89_decode_bf16",
    reinterpret_cast<const void*>(&attention_combine_kernel<__nv_bfloat16, kMostDimV>), 0,
    loaded_bf16};

}  // namespace flashmoe::sm89_decode
