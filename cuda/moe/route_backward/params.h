// The argument of the kernel of routing's gradients.
#pragma once

#include <cstdint>

namespace flashmoe::moe_route_backward {

inline constexpr int kWarps = 4;  // per block, one token each

// Rows of the caller, `stride` elements apart. `dtype` is a flashmoe::Dtype.
struct Rows {
  void* data;
  int64_t stride;
  int32_t dtype;
};

struct Params {
  const float* dweights;  // [tokens, top_k]
  const int32_t* ids;     // [tokens, top_k]
  const float* dlse;      // [tokens] or nullptr
  Rows scores;            // logits [tokens, columns], or given weights; read
  Rows dscores;           // the same shape; written
  int64_t tokens;
  int32_t columns;
  int32_t top_k;
  int32_t given;    // scores are weights
  int32_t scoring;  // flashmoe_moe_scoring
  int32_t renormalize;
  float scale;
  int32_t accumulate;
};

}  // namespace flashmoe::moe_route_backward
