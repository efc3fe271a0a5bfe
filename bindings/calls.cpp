#include "bindings/calls.h"

#include <cstring>

namespace flashmoe {
bool is_float(flashmoe_dtype dtype) {
  const bool half = dtype.bits == 16 &&
                    (dtype.code == FLASHMOE_DTYPE_FLOAT || dtype.code == FLASHMOE_DTYPE_BFLOAT);
  const bool wide = (dtype.bits == 32 || dtype.bits == 64) && dtype.code == FLASHMOE_DTYPE_FLOAT;
  return (half || wide) && dtype.lanes == 1;
}

const char* name_of_dtype(flashmoe_dtype dtype) {
  if (dtype.code == dlpack::kInt) return "int32";
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT) return "bfloat16";
  return dtype.bits == 16 ? "float16" : dtype.bits == 32 ? "float32" : "float64";
}

bool parse_float_dtype(nb::handle given, flashmoe_dtype* dtype) {
  if (given.is_none()) return false;
  const nb::str name(given);
  for (const flashmoe_dtype each :
       {flashmoe_dtype{FLASHMOE_DTYPE_FLOAT, 16, 1}, flashmoe_dtype{FLASHMOE_DTYPE_BFLOAT, 16, 1},
        kFloat32, flashmoe_dtype{FLASHMOE_DTYPE_FLOAT, 64, 1}}) {
    if (std::strcmp(name.c_str(), name_of_dtype(each)) == 0) return *dtype = each, true;
  }
  return false;
}

}  // namespace flashmoe
