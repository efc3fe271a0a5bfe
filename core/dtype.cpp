#include "core/dtype.h"

namespace flashmoe {

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return "fp32";
    case Dtype::kFloat16: return "fp16";
    case Dtype::kBFloat16: return "bf16";
    case Dtype::kFloat64: return "fp64";
    case Dtype::kFloat8E4M3: return "fp8_e4m3";
  }
  return "?";
}

int64_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return 8;
    case Dtype::kFloat32: return 4;
    case Dtype::kFloat8E4M3: return 1;
    default: return 2;
  }
}

}  // namespace flashmoe
