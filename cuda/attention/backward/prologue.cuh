// What the main kernel needs of each row before it starts: lse * log2(e) and sum(dout * out) -
// dlse. It also sets the turns and the ticket to zero, and dQ of tiles whose rows see no key.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

inline constexpr int kPrologueThreads = 256;
template <class Traits>
inline constexpr int kPrologueRows = smaller(Traits::kTileQ, 64);  // of a block

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

template <class Traits>
inline constexpr int kPrologueLanes = Traits::kDimV > 128  ? 32
                                      : Traits::kDimV > 64 ? 16
                                                           : 8;
template <class Traits>
inline constexpr int kPrologueBlocksPerTile = Traits::kTileQ / kPrologueRows<Traits>;

// What a block does for its rows of a query head, which are padded to whole tiles: their numbers,
// and dQ where none of a tile sees a key. `of` says where they are: tile.cuh.
template <class Traits, class Of>
__device__ __forceinline__ void prepare_rows(const CommonParams& params, const Of& of, int head,
                                             int block_of_head) {
  using Element = typename Traits::Element;
  constexpr int kLanes = kPrologueLanes<Traits>;  // of a row
  constexpr int kRowsAtOnce = kPrologueThreads / kLanes;
  constexpr int kRows = kPrologueRows<Traits>;
  constexpr int kPasses = kRows / kRowsAtOnce;
  constexpr int kBlocksPerTile = kPrologueBlocksPerTile<Traits>;
  static_assert(kPasses * kRowsAtOnce == kRows && kBlocksPerTile * kRows == Traits::kTileQ);
  const int first_row = block_of_head * kRows;
  const int thread = thread_index();
  const int lane = thread % kLanes;
  const int column = lane * 8;
  const int batch = batch_q_of(of);
  const int begin = begin_q_of(of);
  const int seq_q = length_q_of(params, of);

  uint32_t out[kPasses][4];
  uint32_t dout[kPasses][4];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + thread / kLanes;
    const bool valid = row < seq_q && column < params.dim_v;
    const auto chunk_of = [&](const Rows& rows) {
      return rows.data + batch * rows.strides.batch + head * rows.strides.head +
             (begin + row) * rows.strides.seq + column;
    };
    ptx::load_streaming_or_zero(out[pass], chunk_of(params.out_rows), valid);
    ptx::load_or_zero(dout[pass], chunk_of(params.dout_rows), valid);
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
    const int64_t place =
        static_cast<int64_t>(tile_of_head(params, of, head)) * Traits::kTileQ + row;
    if (row < seq_q && first_key_of(params, of, row) < end_key_of(params, of, row)) {
      const auto of_row = [&](const float* numbers, const RowStrides& strides) {
        return numbers[batch * strides.batch + head * strides.head + (begin + row) * strides.seq];
      };
      if (params.dlse != nullptr) delta -= of_row(params.dlse, params.dlse_strides);
      const float lse = of_row(params.lse, params.lse_strides);
      params.row_lse[place] = kIsBiased<Traits> ? lse : lse * kLog2E;
      params.row_delta[place] = delta;
    } else {
      params.row_lse[place] = INFINITY;
      params.row_delta[place] = 0.0f;
    }
  }

  const Parts parts = Parts::of<Traits>(params, of, block_of_head / kBlocksPerTile);
  const Gradient& dq = params.dq_rows;
  if (parts.first <= parts.last || dq.rows == nullptr || params.accumulate != 0) return;
  for (int row = first_row + thread / kLanes; row < min(first_row + kRows, seq_q);
       row += kRowsAtOnce) {
    const int64_t place =
        batch * dq.strides.batch + head * dq.strides.head + (begin + row) * dq.strides.seq;
    for (int c = lane; c < params.dim; c += kLanes) {
      if (dq.fp32 != 0) {
        static_cast<float*>(dq.rows)[place + c] = 0.0f;
      } else {
        static_cast<uint16_t*>(dq.rows)[place + c] = 0;
      }
    }
  }
}

// Turns of a tile of dQ; one thread.
template <class Traits>
__device__ __forceinline__ void clear_turns(const CommonParams& params, int tile) {
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
    params.turns[tile * Traits::kPanels + panel] = 0;
  }
}

// A block has rows of one head.
template <class Traits>
__global__ void __launch_bounds__(kPrologueThreads)
    attention_backward_prologue(const __grid_constant__ CommonParams params) {
  constexpr int kBlocksPerTile = kPrologueBlocksPerTile<Traits>;
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int blocks_per_head = params.tiles_q * kBlocksPerTile;
  const int block = static_cast<int>(blockIdx.x);
  // Heads of a row mostly lie side by side, so blocks of the same rows follow one another.
  const int rows_of_all = block / params.heads_q;
  const int head = block - rows_of_all * params.heads_q;
  Item item = {};
  item.batch = rows_of_all / blocks_per_head;
  const int block_of_head = rows_of_all - item.batch * blocks_per_head;
  const int thread = thread_index();

  if (thread == 0) {
    if (block_of_head % kBlocksPerTile == 0) {
      clear_turns<Traits>(params,
                          tile_of_head(params, item, head) + block_of_head / kBlocksPerTile);
    }
    if (block == 0) *params.ticket = 0;
  }
  static_assert(kBlocksOfLargest <= kPrologueThreads, "a thread for each item that may be split");
  if (block == 0 && thread < kBlocksOfLargest) params.split_turns[thread] = 0;
  prepare_rows<Traits>(params, item, head, block_of_head);
}

}  // namespace flashmoe::attention_backward
