// Arguments of the combining kernel, as the device sees them.
#pragma once

#include <cstdint>

namespace flashmoe::moe_combine {

struct Params {
  const uint16_t* y;  // [rows, hidden]; strides in elements
  int64_t y_stride;
  uint16_t* out;  // [tokens, hidden]
  int64_t out_stride;
  const int32_t* slots;  // [tokens, top_k]
  const float* weights;  // [tokens, top_k]; nullptr: all are 1
  int32_t rows;
  int32_t tokens;
  int32_t top_k;
  int32_t pieces;  // per row, of 8 elements
};

}  // namespace flashmoe::moe_combine
