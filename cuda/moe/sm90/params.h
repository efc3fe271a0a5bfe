// Arguments of the sm_90 grouped products, as the device sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/bias.h"

namespace flashmoe::moe::sm90 {

inline constexpr int kCluster = 2;    // blocks that share weights
inline constexpr int kHalves = 2;     // halves of a tile's weight rows: gate and up, or neighbours
inline constexpr int kConsumers = 2;  // consumer warpgroups per block
inline constexpr int kBoxColumns = 64;  // per box: 128 bytes, the widest swizzle
inline constexpr int kUnitTokens = 16;  // tiles are a multiple of this many tokens wide
inline constexpr int kTokenBoxes = 12;  // upper bound on the units of tokens in a box
// The output is stored in boxes of these heights, greatest first, so that no row of another expert
// is touched.
inline constexpr int kOutHeights = 3;
inline constexpr int kOutBoxRows[kOutHeights] = {32, 8, 1};
inline constexpr int kGradientTokens = 32;  // per step of kUpGradient after the products
// Upper bounds on columns of weights that a kernel keeps in registers: with tiles of many tokens,
// and of fewer.
inline constexpr int kMostKeptColumns = 256;
inline constexpr int kMostKeptOfFewer = 512;

// The families of activation functions, for the kernel.
enum Curve : int32_t {
  kIdentity,
  kSwish,    // z * sigmoid(swish_scale * z + swish_cube * z^3)
  kGeluErf,  // z * Phi(z)
  kRelu,     // max(z, 0)
  kRelu2
};

struct Params {
  // Tensor maps of rank 4; the last dimension is 1. Each half is [columns, rows, experts] in boxes
  // of 64 columns by the rows that a tile has of it. If transposed, it is [rows, columns, experts]
  // in boxes of 64 by 64.
  CUtensorMap weights[kHalves];
  // Contiguous rows, for kernels that do not gather: [columns, rows, batches] in boxes of half of
  // the tokens of a tile. Map i is for tiles of i + 1 units.
  CUtensorMap tokens[kTokenBoxes];
  // [rows of weights, rows, batches] in boxes of each of kOutBoxRows.
  CUtensorMap out[kOutHeights];
  CUtensorMap pre_activation[kHalves][kOutHeights];  // per half; without a gate, only the first

  // For kUpGradient, whose output is a, and whose pre_activation are the gradients of g and u.
  CUtensorMap before[kHalves];  // g and u, in boxes of kGradientTokens rows
  const float* row_weights;     // [rows]; `pairs` are tokens here, equivalent with top_k 1
  float* dots;                  // [tiles of rows][kConsumers][rows] parts of <da, a>, or nullptr
  int32_t wants_dz;
  int32_t wants_a;

  // Rows to gather: slot s reads row pairs[s] / top_k of x.
  const uint16_t* x;
  uint32_t x_row_chunks;  // row stride in chunks of 16 bytes
  const int32_t* pairs;
  const float* pair_weights;  // weight_on_input: by pair; or nullptr
  int32_t top_k;

  // Expert e has the rows offsets[e] to offsets[e + 1] - 1, or the first counts[e] of batch e.
  const int32_t* offsets;
  const int32_t* counts;
  int32_t rows;  // existing rows (per batch)
  int32_t experts;

  // Progress of a layer between its `up` and its `down`; nullptr for a product alone. It has the
  // number of tiles that each consumer of `up` has stored, [clusters][kCluster][kConsumers], and
  // then the number of items that clusters of `down` have taken after their first ones. `up` clears
  // it.
  uint32_t* progress;
  int32_t up_clusters;
  int32_t up_row_tiles;   // row_tiles of `up`
  int32_t up_tile_units;  // upper bound on the width of its tiles

  int32_t columns;            // the products sum over these
  int32_t out_rows;           // of the weights, per half if they are gated
  int32_t row_tiles;          // tiles along them
  int32_t columns_per_group;  // columns of items whose tokens should stay in the L2 together
  int32_t tiles_per_run;      // upper bound on token tiles per run, for kept weights

  Bias bias[kHalves];  // per half if they are gated, otherwise the first
  int32_t curve;
  int32_t pre_activated;  // pre_activation is wanted
  float swish_scale;      // -log2(e) times the formula's scale
  float swish_cube;
  float limit;  // infinity: no limit
  float up_offset;

  // For kWideDown, which has no maps of its output. Strides are in elements.
  void* wide_out;
  int64_t wide_row_stride;
  int64_t wide_batch_stride;
  int32_t wide_is_fp32;
  int32_t wide_adds;
};

}  // namespace flashmoe::moe::sm90
