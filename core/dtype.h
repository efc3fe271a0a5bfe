// Element types of the operands.
#pragma once

#include <cstdint>

namespace flashmoe {

// Only KV caches have 8 bits.
enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64, kFloat8E4M3 };

// The `kernel` of a call, as problems keep it.
using KernelName = char[72];

const char* dtype_name(Dtype dtype);  // "fp32", "fp16", "bf16", "fp64", "fp8_e4m3"
int64_t dtype_bytes(Dtype dtype);

}  // namespace flashmoe
