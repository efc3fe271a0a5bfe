// Arguments of the sm_90 grouped products, as the device sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/bias.h"

namespace flashmoe::moe::sm90 {

inline constexpr int kCluster = 2;      // blocks that share weights
inline constexpr int kHalves = 2;       // of a tile's weight rows: gate and up, or neighbours
inline constexpr int kConsumers = 2;    // warpgroups of a block that multiply
inline constexpr int kBoxColumns = 64;  // of all boxes: 128 bytes, the widest swizzle
inline constexpr int kUnitTokens = 16;  // tiles are so many tokens wide, or a multiple
inline constexpr int kTokenBoxes = 12;  // of as many units of tokens at most
// The output is written in boxes of so many rows: greatest first, so that no row of another expert
// is touched.
inline constexpr int kOutHeights = 3;
inline constexpr int kOutBoxRows[kOutHeights] = {32, 8, 1};
inline constexpr int kGradientTokens = 32;  // of a step of kUpGradient behind the products
// Of weights that a kernel keeps in registers, at most: with tiles of many tokens, and of fewer.
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
  // Tensor maps of rank 4, the last dimension 1. Of each half: [columns, rows, experts] in boxes of
  // 64 columns of as many rows as a tile has of it; transposed [rows, columns, experts] in boxes of
  // 64 by 64.
  CUtensorMap weights[kHalves];
  // Rows as they lie, not for kernels that gather: [columns, rows, batches] in boxes of
  // half of the tokens of a tile that is so many units wide.
  CUtensorMap tokens[kTokenBoxes];
  // [rows of weights, rows, batches] in boxes of each of kOutBoxRows.
  CUtensorMap out[kOutHeights];
  CUtensorMap pre_activation[kHalves][kOutHeights];  // of each half; without a gate the first

  // Of kUpGradient, whose output is a, and whose pre_activation are the gradients of g and of u.
  CUtensorMap before[kHalves];  // g and u, in boxes of kGradientTokens rows
  const float* row_weights;     // [rows]; `pairs` are tokens, which is as much with a top_k of 1
  float* dots;                  // [tiles of rows][kConsumers][rows] parts of <da, a>, or nullptr
  int32_t wants_dz;
  int32_t wants_a;

  // Rows to gather: slot s has row pairs[s] / top_k of x.
  const uint16_t* x;
  uint32_t x_row_chunks;  // from row to row, chunks of 16 bytes
  const int32_t* pairs;
  const float* pair_weights;  // weight_on_input: by pair; or nullptr
  int32_t top_k;

  // Expert e has the rows offsets[e] to offsets[e + 1] - 1; or, in batch e, the first counts[e].
  const int32_t* offsets;
  const int32_t* counts;
  int32_t rows;  // that there are (in a batch)
  int32_t experts;

  // Of a layer, between its `up` and its `down`; nullptr: a product alone. How many tiles each
  // consumer of `up` has stored, [clusters][kCluster][kConsumers], and behind these how many items
  // clusters of `down` have taken after their first. `up` sets it to zero.
  uint32_t* progress;
  int32_t up_clusters;
  int32_t up_row_tiles;   // row_tiles of `up`
  int32_t up_tile_units;  // that its tiles are wide, at most

  int32_t columns;            // the extent that products sum over
  int32_t out_rows;           // of the weights, of one half if they are gated
  int32_t row_tiles;          // tiles along them
  int32_t columns_per_group;  // columns of items whose tokens are to stay in the L2 together
  int32_t tiles_per_run;      // at most, of tokens, where weights are kept

  Bias bias[kHalves];  // of each half if they are gated, else the first
  int32_t curve;
  int32_t pre_activated;  // pre_activation is wanted
  float swish_scale;      // -log2(e) times that of the formula
  float swish_cube;
  float limit;  // infinity: none
  float up_offset;

  // Of kWideDown, which has no maps of its output: strides in elements.
  void* wide_out;
  int64_t wide_row_stride;
  int64_t wide_batch_stride;
  int32_t wide_is_fp32;
  int32_t wide_adds;
};

}  // namespace flashmoe::moe::sm90
