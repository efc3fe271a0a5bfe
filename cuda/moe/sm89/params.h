// The argument of the sm_89 grouped-product kernels.
#pragma once

#include <cstdint>
#include "cuda/tile/bias.h"

namespace flashmoe::moe::sm89 {

inline constexpr int32_t kNoActivation = -1;

// [experts, rows, columns], 16-bit. `stride` is from row to row if columns are contiguous, and from
// column to column if the matrix is transposed, in elements.
struct Weights {
  const uint16_t* data;
  int64_t expert_stride;
  int64_t stride;
};

// Strides are in elements. With `offsets`, the rows of x and out are slots, and expert e has those
// from offsets[e] to offsets[e + 1]. With `counts`, expert e has the first counts[e] of its own
// `rows`, which begin x_expert_stride and out_expert_stride after those of the previous expert.
// With `pairs`, slot s reads row pairs[s] / top_k of x.
struct Params {
  const uint16_t* x;
  int64_t x_stride;
  int64_t x_expert_stride;
  uint16_t* out;
  int64_t out_stride;
  int64_t out_expert_stride;
  uint16_t* pre_activation;  // or nullptr
  int64_t pre_activation_stride;
  Weights weights[2];  // gate and up, or one matrix
  Bias bias[2];
  const int32_t* offsets;     // [experts + 1] or nullptr
  const int32_t* counts;      // [experts] or nullptr
  const int32_t* pairs;       // [rows] or nullptr
  const float* pair_weights;  // [rows] by pair, factors of x; or nullptr
  int32_t rows;
  int32_t columns;      // K, of x and of the weights
  int32_t out_columns;  // of out: weight rows, for a gate and an up those of one
  int32_t experts;
  int32_t top_k;
  int32_t weight_tiles;         // tiles that cover out_columns
  int32_t swizzle_token_tiles;  // token tiles whose rows of x fit the L2 together
  int32_t interleaved;          // transposed gate and up whose columns alternate
  int32_t activation;           // flashmoe_activation, or kNoActivation
  float alpha;
  float limit;  // infinity: no limit
  float up_offset;
  int32_t out_is_fp32;  // only for plain products, like `adds`
  int32_t adds;         // the output is accumulated
};

}  // namespace flashmoe::moe::sm89
