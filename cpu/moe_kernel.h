// Between the launchers and the per-ISA kernels of the mixture of experts: a tile of a product and
// who computes it. Included by translation units compiled with different -m flags, so it holds
// plain declarations only: no inline function, no standard header that brings any.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/ops/moe/problem.h"

namespace flashmoe::cpu {

// Rows of one expert's matrix, from the tile's first on.
struct MoeWeights {
  const void* data;  // row r, column c is r * row_stride + c * column_stride elements further
  int64_t row_stride;
  int64_t column_stride;
  const void* bias;  // nullptr: none
  Dtype bias_dtype;
  int64_t bias_stride;
};

// What follows a product and comes before the store.
struct MoeActivation {
  flashmoe_activation function;
  float alpha;
  float limit;  // infinity: none
  float up_offset;
};

// Products of the rows of x that one expert has with rows of its matrix:
//
//   out[r][n] = scale[r] * (x[r] . weights[0][n]) + bias     or, with an activation, act of that,
//   out[r][n] = act(g) * (u + up_offset)                     with two matrices, gate and up
struct MoeTile {
  const void* const* x;  // [rows] pointers to `depth` contiguous elements
  const float* scale;    // [rows]; nullptr: 1
  int64_t rows;
  int64_t depth;
  int64_t columns;  // rows of the matrix, or of each of the two
  int matrices;
  MoeWeights weights[2];
  bool fetch_ahead;                 // few rows may fetch weights that lie by columns
  const MoeActivation* activation;  // nullptr: none
  void* out;                        // row r is r * out_stride elements further
  int64_t out_stride;
  void* before[2];  // what the activation is applied to, likewise; nullptr: not wanted
  int64_t before_stride;
};

// One token's sum: out = sum of weights[k] * y[k] over the k whose y[k] is not nullptr, in order;
// without `weights` they are 1.
struct MoeSum {
  const void* y[kMaxTopK];
  const float* weights;
  int32_t top_k;
  int64_t hidden;
  void* out;
};

// A tile at its largest.
struct MoeTileSize {
  int64_t rows;
  int64_t columns;  // of all matrices together
};

// The kernels of one instruction set for one dtype.
struct MoeKernel {
  const char* isa;
  MoeTileSize many[2];  // of many rows: where depth is contiguous, where columns are
  int64_t few_sums;     // most rows, to the next multiple of group_rows, times columns, of few rows
  int64_t group_rows;
  int64_t few_rows;      // so few rows are computed as the matrix streams by
  size_t scratch_bytes;  // of one thread
  // `scratch` is 64-byte aligned. Writes out and before, and nothing else.
  void (*multiply)(const MoeTile& tile, void* scratch);
  void (*add)(const MoeSum& sum);
};

// One per instruction set, indexed by Dtype.
extern const MoeKernel kScalarMoe[3];
#if FLASHMOE_CPU_X86
extern const MoeKernel kAvx2Moe[3];
extern const MoeKernel kAvx512Moe[3];
extern const MoeKernel kAvx512Bf16Moe;  // bf16 only
#if FLASHMOE_CPU_AMX
extern const MoeKernel kAmxMoe;  // bf16 only
#endif
#endif

}  // namespace flashmoe::cpu
