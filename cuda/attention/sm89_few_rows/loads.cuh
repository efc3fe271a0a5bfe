// Loads of a step and of queries, and the mask, for the products of few rows
// (cuda/attention/few_rows/products.cuh).
#pragma once

#include "cuda/attention/few_rows/products.cuh"
#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/attention/sm89_few_rows/tile.cuh"
#include "cuda/ptx/global.cuh"

namespace flashmoe::sm89_few_rows {

using few_rows::Accumulators;
using few_rows::Fragments;
using few_rows::KFragments;
using few_rows::multiply_k;
using few_rows::multiply_v;
using few_rows::Probabilities;
using few_rows::QFragments;
using few_rows::Scores;
using few_rows::Statistics;
using few_rows::v_key;
using few_rows::VFragments;

// Loads this lane's part of one step. `k` is at the step's key g and element 8t. `keys` are left
// from the step's first on; keys past them become zero.
template <class Traits>
__device__ __forceinline__ void load_k(KFragments<Traits>& fragments, const uint16_t* k,
                                       int64_t stride, int keys, int dim) {
  if (keys >= Traits::kStepKeys && dim == Traits::kDim) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        ptx::load_streaming(fragments[i][c], k + 8 * i * stride + 32 * c);
      }
    }
  } else {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        const bool valid = 8 * i + lane / 4 < keys && 32 * c + 8 * (lane % 4) < dim;
        ptx::load_streaming_or_zero(fragments[i][c], k + 8 * i * stride + 32 * c, valid);
      }
    }
  }
}

// `v` is at the step's key 2t and column 8g.
template <class Traits>
__device__ __forceinline__ void load_v(VFragments<Traits>& fragments, const uint16_t* v,
                                       int64_t stride, int keys, int dim_v) {
  if (keys >= Traits::kStepKeys && dim_v == Traits::kDimV) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kVChunks; ++c) {
        ptx::load_streaming(fragments[i][c], v + v_key(i) * stride + 64 * c);
      }
    }
  } else {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kVChunks; ++c) {
        const bool valid = v_key(i) + 2 * (lane % 4) < keys && 64 * c + 8 * (lane / 4) < dim_v;
        ptx::load_streaming_or_zero(fragments[i][c], v + v_key(i) * stride + 64 * c, valid);
      }
    }
  }
}

// This lane's chunks of row 8n + g, or zeros if the row is missing.
template <class Traits>
__device__ __forceinline__ void load_q_block(uint32_t (&fragments)[Traits::kKChunks][4],
                                             const Params& params, const Tile& tile, int n) {
  const int lane = lane_index();
  const int row = 8 * n + lane / 4;
  const uint16_t* q = params.tensors.q +
                      Row::of(params, tile, row).offset(params.tensors.q_strides, tile.batch) +
                      8 * (lane % 4);
#pragma unroll
  for (int c = 0; c < Traits::kKChunks; ++c) {
    ptx::load_or_zero(fragments[c], q + 32 * c,
                      row < tile.rows && 32 * c + 8 * (lane % 4) < params.tensors.dim);
  }
}

// Masks the keys that a row does not see. `first_key` is the step's.
template <class Traits>
__device__ __forceinline__ void mask_step(Scores<Traits>& scores, const Params& params,
                                          const Tile& tile, const Shared<Traits>& shared,
                                          int first_key) {
  const int lane = lane_index();
  const int key = first_key + lane / 4;
  mask_scores<Fragments<Traits>>(scores, [&](int r) {
    Keys keys = {0, sequence_of(params, tile.batch).length_k};
    if (params.score.masked) keys = shared.keys()[2 * (lane % 4) + Fragments<Traits>::row_of(r)];
    return [keys, key](int i) {
      const int at = key + Fragments<Traits>::key_of(i);
      return !(at < keys.first || at >= keys.end);
    };
  });
}

}  // namespace flashmoe::sm89_few_rows
