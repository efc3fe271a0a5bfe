// Arguments of the sm_90 grouped products, as the device sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashmoe::moe_sm90 {

// A bias [experts, rows] of one half of the weight rows. data is nullptr where there is none.
struct Bias {
  const void* data;
  int64_t expert_stride;  // elements
  int64_t row_stride;
  int32_t is_float;  // else in the element type of the kernel
};

// The families of activation functions, for the kernel.
enum Curve : int32_t {
  kIdentity,
  kSwish,    // z * sigmoid(swish_scale * z + swish_cube * z^3)
  kGeluErf,  // z * Phi(z)
  kRelu,     // max(z, 0)
  kRelu2
};

struct Params {
  // Tensor maps of rank 4, the last dimension 1. Of each half: [columns, rows, experts] in boxes of 64
  // columns by 128 rows.
  CUtensorMap weights[2];
  // Rows as they lie, not for kernels that gather: [columns, rows, batches] in boxes of 64 columns.
  CUtensorMap tokens;
  // [rows of weights, rows, batches] in boxes of 64 columns by each of kOutBoxRows.
  CUtensorMap out[3];
  CUtensorMap pre_activation[2][3];  // of each half; without a gate of the first

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

  int32_t columns;          // the extent that products sum over
  int32_t out_rows;         // of the weights, of one half if they are gated
  int32_t row_tiles;        // tiles along them
  int32_t pairs_per_group;  // pairs of token tiles whose tokens are to stay in the L2 together
  int32_t multicast;        // whether the blocks of a cluster share what they both need

  Bias bias[2];  // of each half if they are gated, else the first
  int32_t curve;
  int32_t plain;           // products are taken as they are: no bias, weights of pairs, limit, offset,
                           // and the activation is SiLU times up, or none
  int32_t pre_activated;   // pre_activation is wanted
  float swish_scale;       // -log2(e) times that of the formula
  float swish_cube;
  float limit;             // infinity: none
  float up_offset;
};

}  // namespace flashmoe::moe_sm90
