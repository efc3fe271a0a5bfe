// Values of each row that the main kernel needs before it starts: lse * log2(e) and sum(dout * out)
// - dlse. It also clears the turns and the ticket, and sets dQ of tiles whose rows see no key to
// zero.
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
inline constexpr int kPrologueRows = smaller(Traits::kTileQ, 64);  // per block

template <class Element>
__device__ __forceinline__ float dot(const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  using Numeric = numeric::ElementTraits<Element>;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 of_a = Numeric::unpack(a[i]);
    const float2 of_b = Numeric::unpack(b[i]);
    sum = fmaf(of_a.x, of_b.x, sum);
    sum = fmaf(of_a.y, of_b.y, sum);
  }
  return sum;
}

template <class Traits>
inline constexpr int kPrologueLanes = Traits::kDimV > 128  ? 32
                                      : Traits::kDimV > 64 ? 16
                                                           : 8;
template <class Traits>
inline constexpr int kPrologueBlocksPerTile = Traits::kTileQ / kPrologueRows<Traits>;

// Sums `values` over `kLanes` neighbouring lanes, separately for each index. In each step a lane
// passes on half of its sums, so that it ends with one. `index_of_sum` returns the index of that
// one. This needs fewer shuffles than one sum at a time, and adds in the same order.
template <int kLanes, int kValues>
__device__ __forceinline__ float sum_over_lanes(float (&values)[kValues], int lane) {
  static_assert(kValues <= kLanes);
#pragma unroll
  for (int distance = kLanes / 2, left = kValues; distance > 0; distance /= 2) {
    if (left == 1) {
      values[0] += __shfl_xor_sync(kFullWarp, values[0], distance);
      continue;
    }
    left /= 2;
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = upper ? values[left + i] : values[i];
      const float given = upper ? values[i] : values[left + i];
      values[i] = kept + __shfl_xor_sync(kFullWarp, given, distance);
    }
  }
  return values[0];
}
template <int kLanes, int kValues>
__device__ __forceinline__ int index_of_sum(int lane) {
  return lane % kLanes / (kLanes / kValues);
}

// The work of a block for its rows of a query head, which are padded to whole tiles: their values,
// and dQ if no row of a tile sees a key. `of` says where the rows are (tile.cuh).
template <class Traits, class Of>
__device__ __forceinline__ void prepare_rows(const CommonParams& params, const Of& of, int head,
                                             int block_of_head) {
  using Element = typename Traits::Element;
  constexpr int kLanes = kPrologueLanes<Traits>;  // per row
  constexpr int kRowsAtOnce = kThreadsPerWarp / kLanes;
  constexpr int kRows = kPrologueRows<Traits>;
  constexpr int kRowsOfWarp = kRows / (kPrologueThreads / kThreadsPerWarp);
  constexpr int kPasses = kRowsOfWarp / kRowsAtOnce;
  constexpr int kBlocksPerTile = kPrologueBlocksPerTile<Traits>;
  static_assert(kPasses * kRowsAtOnce == kRowsOfWarp && kBlocksPerTile * kRows == Traits::kTileQ);
  const int lane = lane_index();
  const int first_row =
      block_of_head * kRows + thread_index() / kThreadsPerWarp * kRowsOfWarp;  // of the warp
  const int column = lane % kLanes * 8;
  const int batch = batch_q_of(of);
  const int begin = begin_q_of(of);
  const int seq_q = length_q_of(params, of);

  // A lane's rows are kRowsAtOnce apart.
  const int row_of_lane = first_row + lane / kLanes;
  const auto first_chunk = [&](const Rows& rows) {
    return rows.data + batch * rows.strides.batch + head * rows.strides.head +
           (begin + row_of_lane) * rows.strides.seq + column;
  };
  const uint16_t* const first_out = first_chunk(params.out_rows);
  const uint16_t* const first_dout = first_chunk(params.dout_rows);
  uint32_t out[kPasses][4];
  uint32_t dout[kPasses][4];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int ahead = pass * kRowsAtOnce;
    const bool valid = row_of_lane + ahead < seq_q && column < params.dim_v;
    ptx::load_streaming_or_zero(out[pass], first_out + ahead * params.out_rows.strides.seq, valid);
    ptx::load_streaming_or_zero(dout[pass], first_dout + ahead * params.dout_rows.strides.seq,
                                valid);
  }

  // The row whose values this lane writes, as one of the lanes that have its sum.
  const int row = row_of_lane + index_of_sum<kLanes, kPasses>(lane) * kRowsAtOnce;
  const bool writes = lane % (kLanes / kPasses) == 0;
  const bool sees_keys =
      row < seq_q &&
      (params.score.blind_rows == 0 || first_key_of(params, of, row) < end_key_of(params, of, row));
  // In flight together with the rows.
  float lse = INFINITY;
  float dlse = 0.0f;
  if (writes && sees_keys) {
    const auto of_row = [&](const float* numbers, const RowStrides& strides) {
      return numbers[batch * strides.batch + head * strides.head + (begin + row) * strides.seq];
    };
    lse = of_row(params.lse, params.lse_strides);
    if (params.dlse != nullptr) dlse = of_row(params.dlse, params.dlse_strides);
  }
  float sums[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) sums[pass] = dot<Element>(out[pass], dout[pass]);
  const float sum = sum_over_lanes<kLanes>(sums, lane);
  if (writes) {
    const int64_t place =
        static_cast<int64_t>(tile_of_head(params, of, head)) * Traits::kTileQ + row;
    float delta = sees_keys ? sum - dlse : 0.0f;
    if constexpr (kIsBiased<Traits>) {
      // With a mask, a row that sees no key has an lse of -inf.
      if (lse == -INFINITY) {
        lse = INFINITY;
        delta = 0.0f;
      }
      params.row_lse[place] = lse;
    } else {
      params.row_lse[place] = lse * kLog2E;
    }
    params.row_delta[place] = delta;
  }

  if (params.score.blind_rows == 0) return;
  const Parts parts = Parts::of<Traits>(params, of, block_of_head / kBlocksPerTile);
  const Gradient& dq = params.dq_rows;
  if (parts.first <= parts.last || dq.rows == nullptr || params.accumulate != 0) return;
  for (int i = 0; i < kRowsOfWarp && first_row + i < seq_q; ++i) {
    const int64_t place = batch * dq.strides.batch + head * dq.strides.head +
                          (begin + first_row + i) * dq.strides.seq;
    for (int c = lane; c < params.dim; c += kThreadsPerWarp) {
      if (dq.fp32 != 0) {
        static_cast<float*>(dq.rows)[place + c] = 0.0f;
      } else {
        static_cast<uint16_t*>(dq.rows)[place + c] = 0;
      }
    }
  }
}

// Clears the turns of a tile of dQ. One thread calls it.
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
  // The heads of a row are mostly contiguous, so blocks of the same rows follow one another.
  // Unsigned divisions are shorter.
  const auto blocks_per_head = static_cast<uint32_t>(params.tiles_q * kBlocksPerTile);
  const auto heads = static_cast<uint32_t>(params.heads_q);
  const uint32_t block = blockIdx.x;
  const uint32_t rows_of_all = block / heads;
  const uint32_t batch = rows_of_all / blocks_per_head;
  const auto head = static_cast<int>(block - rows_of_all * heads);
  const auto block_of_head = static_cast<int>(rows_of_all - batch * blocks_per_head);
  Item item = {};
  item.batch = static_cast<int>(batch);
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
