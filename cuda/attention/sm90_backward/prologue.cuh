// What the main kernel needs of each row before it starts: lse * log2(e) and sum(dout * out) -
// dlse. It also sets the turns and the ticket to zero, and dQ of tiles whose rows see no key.
#pragma once

#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90_backward {

inline constexpr int kPrologueThreads = 256;
inline constexpr int kPrologueRows = 64;  // of a block

template <class Element>
__device__ __forceinline__ float dot(const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  using Numeric = numeric::ElementTraits<Element>;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum = fmaf(Numeric::to_float(static_cast<uint16_t>(a[i] >> 16 * half)),
                 Numeric::to_float(static_cast<uint16_t>(b[i] >> 16 * half)), sum);
    }
  }
  return sum;
}

// Blocks of 64 rows of one head, rows padded to whole tiles.
template <class Traits>
__global__ void __launch_bounds__(kPrologueThreads)
    attention_backward_prologue(const __grid_constant__ Params params) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kDimV > 128 ? 32 : Traits::kDimV > 64 ? 16 : 8;  // of a row
  constexpr int kRowsAtOnce = kPrologueThreads / kLanes;
  constexpr int kPasses = kPrologueRows / kRowsAtOnce;
  constexpr int kBlocksPerTile = Traits::kTileQ / kPrologueRows;
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  const int blocks_per_head = params.tiles_q * kBlocksPerTile;
  const int block = static_cast<int>(blockIdx.x);
  const int head_of_all = block / blocks_per_head;
  const int block_of_head = block - head_of_all * blocks_per_head;
  const int batch = head_of_all / params.heads_q;
  const int head = head_of_all - batch * params.heads_q;
  const int first_row = block_of_head * kPrologueRows;
  const int lane = thread_index() % kLanes;
  const int column = lane * 8;
  const int thread = thread_index();

  if (thread == 0) {
    if (block_of_head % kBlocksPerTile == 0) {
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        params.turns[block / kBlocksPerTile * Traits::kPanels + panel] = 0;
      }
    }
    if (block == 0) *params.ticket = 0;
  }

  uint32_t out[kPasses][4];
  uint32_t dout[kPasses][4];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + thread / kLanes;
    const bool valid = row < params.seq_q && column < params.dim_v;
    ptx::load_streaming_or_zero(out[pass],
                                params.out_rows + batch * params.out_strides.batch +
                                    head * params.out_strides.head + row * params.out_strides.seq +
                                    column,
                                valid);
    ptx::load_or_zero(dout[pass],
                      params.dout_rows + batch * params.dout_strides.batch +
                          head * params.dout_strides.head + row * params.dout_strides.seq + column,
                      valid);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + thread / kLanes;
    float delta = dot<Element>(out[pass], dout[pass]);
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(kFullWarp, delta, distance);
    }
    if (lane != 0) continue;
    const int64_t place = static_cast<int64_t>(head_of_all) * params.tiles_q * Traits::kTileQ + row;
    if (row < params.seq_q && params.score.sees_keys(row, params.seq_k)) {
      const float lse = params.lse[batch * params.lse_strides.batch +
                                   head * params.lse_strides.head + row * params.lse_strides.seq];
      if (params.dlse != nullptr) {
        delta -= params.dlse[batch * params.dlse_strides.batch + head * params.dlse_strides.head +
                             row * params.dlse_strides.seq];
      }
      params.row_lse[place] = lse * kLog2E;
      params.row_delta[place] = delta;
    } else {
      params.row_lse[place] = INFINITY;
      params.row_delta[place] = 0.0f;
    }
  }

  const Parts parts = Parts::of<Traits>(params, block_of_head / kBlocksPerTile);
  if (parts.first <= parts.last) return;
  const bool direct = params.dq_direct.rows != nullptr;
  if (direct ? params.accumulate != 0 : params.dq_rows == nullptr) return;
  const RowStrides& strides = direct ? params.dq_direct.strides : params.dq_strides;
  const bool fp32 = direct && params.dq_direct.fp32;
  for (int row = first_row + thread / kLanes; row < min(first_row + kPrologueRows, params.seq_q);
       row += kRowsAtOnce) {
    const int64_t place = batch * strides.batch + head * strides.head + row * strides.seq;
    for (int c = lane; c < params.dim; c += kLanes) {
      if (fp32) {
        static_cast<float*>(params.dq_direct.rows)[place + c] = 0.0f;
      } else {
        (direct ? static_cast<uint16_t*>(params.dq_direct.rows) : params.dq_rows)[place + c] = 0;
      }
    }
  }
}

}  // namespace flashmoe::sm90_backward
