// The interface between the launchers and the per-ISA kernels of the mixture of experts: a tile of
// a product and its kernels. Translation units compiled with different -m flags include this file,
// so it holds plain declarations only: no inline function, and no standard header that has any.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/ops/moe/problem.h"

namespace flashmoe::cpu {

// Rows of one expert's matrix, from the tile's first on.
struct MoeWeights {
  const void* data;  // row r, column c is at r * row_stride + c * column_stride elements
  int64_t row_stride;
  int64_t column_stride;
  const void* bias;  // nullptr: none
  Dtype bias_dtype;
  int64_t bias_stride;
};

// What is applied to a product before the store.
struct MoeActivation {
  flashmoe_activation function;
  float alpha;
  float limit;  // infinity: none
  float up_offset;
};

// Products of one expert's rows of x with rows of its matrix:
//
//   out[r][n] = scale[r] * (x[r] . weights[0][n]) + bias     or, with an activation, act of that,
//   out[r][n] = act(g) * (u + up_offset)                     with two matrices, gate and up
struct MoeTile {
  const void* const* x;  // [rows] pointers to `depth` contiguous elements
  const double* scale;   // [rows]; nullptr: 1
  int64_t rows;
  int64_t depth;
  int64_t columns;  // rows of the matrix, or of each of the two
  int matrices;
  MoeWeights weights[2];
  bool fetch_ahead;                 // few rows may fetch weights that lie by columns
  const MoeActivation* activation;  // nullptr: none
  void* out;                        // row r is at r * out_stride elements
  int64_t out_stride;
  bool out_is_fp32;  // whatever x is
  bool adds;         // to the output
  void* before[2];   // inputs of the activation, likewise; nullptr: not wanted
  int64_t before_stride;
};

// One token's sum: out = sum of weights[k] * y[k] over the k with y[k] != nullptr, in order;
// without `weights` all weights are 1. Elements have x's dtype, or fp32.
struct MoeSum {
  const void* y[kMaxTopK];
  const double* weights;
  int32_t top_k;
  int64_t hidden;
  void* out;
  bool y_is_fp32;
  bool out_is_fp32;
  bool adds;  // to the output
};

// The gradient of one row's activation input, and the activation itself:
//
//   a_out = weight * a,  dz = weight * da/dz * da     with a = act(g) * (u + up_offset), or act(u)
//
// and scaled_dz = scale * dz. Beyond the limit dz is 0.
struct MoeActivationGradient {
  const void* before[2];  // [inner] g and u; without a gate u and nullptr
  const void* da;         // [inner] fp32, for fp64 fp64; nullptr: dz is not wanted
  double weight;
  double scale;
  const MoeActivation* activation;
  int64_t inner;
  void* a_out;      // [inner] or nullptr
  void* dz;         // g's at dz_places[0] + i * dz_step, u's at dz_places[1] + ...
  void* scaled_dz;  // likewise, at its own places, or nullptr
  int64_t dz_places[2];
  int64_t scaled_places[2];
  int64_t dz_step;  // 1; or 2 with adjacent places, g's first
};

// A tile of the sum of outer products of rows:
//
//   out[m][n] = sum over r of a[r][m] * b[r][n]
struct MoeOuterProducts {
  const void* const* a;  // [rows] pointers to rows of contiguous elements
  const void* const* b;
  int64_t rows;
  int64_t a_first;  // the tile's elements of a row: `m` from here on
  int64_t b_first;
  int64_t m;
  int64_t n;
  void* out;  // row m is at m * out_stride elements
  int64_t out_stride;
  bool out_is_fp32;  // else a's dtype
  bool adds;         // to the output
};

// out[i] = sum over r of scale[r] * a[r][first + i].
struct MoeRowSums {
  const void* const* a;  // [rows] pointers to rows of contiguous elements
  const double* scale;   // [rows]; nullptr: 1
  int64_t rows;
  int64_t first;
  int64_t columns;
  void* out;
  bool out_is_fp32;
  bool adds;
};

// The largest tile.
struct MoeTileSize {
  int64_t rows;
  int64_t columns;  // over all matrices
};

// The kernels of one instruction set for one dtype. Sums are fp32, for fp64 inputs fp64; numbers of
// a routing are fp64 here and rounded to that.
struct MoeKernel {
  const char* isa;
  MoeTileSize many[2];  // for many rows: with depth contiguous, with columns contiguous
  int64_t few_sums;     // for few rows: the most of rows (rounded up to group_rows) * columns
  int64_t group_rows;
  int64_t few_rows;      // up to this many rows are computed as the matrix streams in
  size_t scratch_bytes;  // per thread
  // `scratch` is 64-byte aligned. Writes out and before, and nothing else.
  void (*multiply)(const MoeTile& tile, void* scratch);
  void (*add)(const MoeSum& sum);
  // Returns the sum of da * a.
  double (*differentiate)(const MoeActivationGradient& row);
  MoeTileSize outer;  // the largest m and n
  void (*add_outer)(const MoeOuterProducts& tile, void* scratch);
  void (*add_rows)(const MoeRowSums& sums);
  // The sum of a[i] * b[i], each in its own dtype.
  double (*dot)(const void* a, Dtype a_dtype, const void* b, Dtype b_dtype, int64_t n);
};

// One per instruction set, indexed by Dtype.
extern const MoeKernel kScalarMoe[3];
extern const MoeKernel kFp64Moe;
#if FLASHMOE_CPU_X86
extern const MoeKernel kAvx2Fp64Moe;
extern const MoeKernel kAvx2Moe[3];
extern const MoeKernel kAvx512Moe[3];
extern const MoeKernel kAvx512Bf16Moe;  // bf16 only
#if FLASHMOE_CPU_AMX
extern const MoeKernel kAmxMoe;  // bf16 only
#endif
#endif

}  // namespace flashmoe::cpu
