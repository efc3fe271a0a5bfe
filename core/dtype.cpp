#include "core/dtype.h"

namespace flashmoe {

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return "fp32";
    case Dtype::kFloat16: return "fp16";
    case Dtype::kBFloat16: return "bf16";
  }
  return "?";
}

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace flashmoe
