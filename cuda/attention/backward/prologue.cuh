// What the main kernel needs of each row before it starts: lse * log2(e) and sum(dout * out) -
// dlse. It also sets the turns and the ticket to zero, and dQ of tiles whose rows see no key.
//
// Workers of 256 threads take chunks of rows in turns, in the order of heads. On Hopper the
// prologue has few blocks and the main kernel begins beside it, by a programmatic launch: an item
// waits for the rows of its heads alone (RowsReady). The prologue is bound by memory, the main
// kernel by its products, so most of the first costs nothing.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

inline constexpr int kWorkerThreads = 256;
inline constexpr int kPrologueThreads = kWorkersPerBlock * kWorkerThreads;

// How a worker shares the rows of a chunk.
template <class Traits>
struct Chunk {
  static constexpr int kLanes = Traits::kDimV > 128 ? 32 : Traits::kDimV > 64 ? 16 : 8;  // of a row
  static constexpr int kRowsAtOnce = kWorkerThreads / kLanes;
  static constexpr int kPasses = 4;  // loads in flight
  static constexpr int kRows = kPasses * kRowsAtOnce;
};

// The chunks that the rows of so many heads reach into.
template <class Traits>
__device__ __forceinline__ uint32_t chunks_of(const CommonParams& params, int heads) {
  constexpr int kRows = Chunk<Traits>::kRows;
  const int64_t rows = static_cast<int64_t>(heads) * params.tiles_q * Traits::kTileQ;
  return static_cast<uint32_t>((rows + kRows - 1) / kRows);
}

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

// Sums over the lanes of a row for four rows at once. The two highest bits of a lane say whose sum
// it gets.
template <int kLanes>
__device__ __forceinline__ float sum_of_rows(const float (&values)[4], int lane) {
  const bool upper = (lane & kLanes / 2) != 0;
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float give = upper ? values[i] : values[i + 2];
    two[i] = (upper ? values[i + 2] : values[i]) + __shfl_xor_sync(kFullWarp, give, kLanes / 2);
  }
  const bool odd = (lane & kLanes / 4) != 0;
  const float give = odd ? two[0] : two[1];
  float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(kFullWarp, give, kLanes / 4);
#pragma unroll
  for (int distance = kLanes / 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, distance);
  }
  return sum;
}

// A row of the padded rows of all heads.
struct RowPlace {
  int batch;
  int head;
  int row;

  // So many batches, heads and rows on.
  __device__ __forceinline__ RowPlace after(const CommonParams& params, int rows_per_head,
                                            int batches, int heads, int rows) const {
    RowPlace at = {batch + batches, head + heads, row + rows};
    while (at.row >= rows_per_head) {
      at.row -= rows_per_head;
      ++at.head;
    }
    while (at.head >= params.heads_q) {
      at.head -= params.heads_q;
      ++at.batch;
    }
    return at;
  }
  __device__ __forceinline__ int head_of_all(const CommonParams& params) const {
    return batch * params.heads_q + head;
  }
  __device__ __forceinline__ bool exists(const CommonParams& params) const {
    return batch < params.batch && row < params.seq_q;
  }
};

__device__ __forceinline__ void clear_dq(const CommonParams& params, const RowPlace& at, int lane,
                                         int lanes) {
  const Gradient& dq = params.dq_rows;
  const int64_t place =
      at.batch * dq.strides.batch + at.head * dq.strides.head + at.row * dq.strides.seq;
  for (int c = lane; c < params.dim; c += lanes) {
    if (dq.fp32 != 0) {
      static_cast<float*>(dq.rows)[place + c] = 0.0f;
    } else {
      static_cast<uint16_t*>(dq.rows)[place + c] = 0;
    }
  }
}

template <class Traits>
__device__ __forceinline__ void prepare_chunk(const CommonParams& params, const RowPlace& first,
                                              int rows_per_head) {
  using Share = Chunk<Traits>;
  using Element = typename Traits::Element;
  constexpr int kLanes = Share::kLanes;
  const int thread = thread_index() % kWorkerThreads;
  const int lane = thread % kLanes;
  const int column = lane * 8;
  const auto place_of = [&](int pass) {
    return first.after(params, rows_per_head, 0, 0, pass * Share::kRowsAtOnce + thread / kLanes);
  };

  uint32_t out[Share::kPasses][4];
  uint32_t dout[Share::kPasses][4];
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const RowPlace at = place_of(pass);
    const bool exists = at.exists(params);
    const auto chunk_of = [&](const Rows& rows) {
      return rows.data + at.batch * rows.strides.batch + at.head * rows.strides.head +
             at.row * rows.strides.seq + column;
    };
    ptx::load_streaming_or_zero(out[pass], chunk_of(params.out_rows),
                                exists && column < params.dim_v);
    ptx::load_or_zero(dout[pass], chunk_of(params.dout_rows), exists && column < params.dim_v);
  }
  // The row whose sum this lane gets.
  const RowPlace at = place_of(lane / (kLanes / Share::kPasses));
  const bool sees = at.exists(params) && params.score.sees_keys(at.row, params.seq_k);
  float lse = INFINITY;
  float dlse = 0.0f;
  if (sees) {
    const auto of_row = [&](const float* numbers, const RowStrides& strides) {
      return numbers[at.batch * strides.batch + at.head * strides.head + at.row * strides.seq];
    };
    lse = of_row(params.lse, params.lse_strides) * kLog2E;
    if (params.dlse != nullptr) dlse = of_row(params.dlse, params.dlse_strides);
  }
  float of_lane[Share::kPasses];
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    of_lane[pass] = dot<Element>(out[pass], dout[pass]);
  }
  const float delta = sum_of_rows<kLanes>(of_lane, lane);
  if (lane % (kLanes / Share::kPasses) == 0 && at.batch < params.batch) {
    const int head = at.head_of_all(params);
    const int64_t place = static_cast<int64_t>(head) * rows_per_head + at.row;
    params.row_lse[place] = lse;
    params.row_delta[place] = sees ? delta - dlse : 0.0f;
    if (at.row % Traits::kTileQ == 0) {
      const int tile = head * params.tiles_q + at.row / Traits::kTileQ;
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        params.turns[tile * Traits::kPanels + panel] = 0;
      }
    }
  }
  if (params.accumulate != 0 || params.dq_rows.rows == nullptr) return;
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const RowPlace row = place_of(pass);
    if (!row.exists(params) || params.score.sees_keys(row.row, params.seq_k)) continue;
    const Parts parts = Parts::of<Traits>(params, row.row / Traits::kTileQ);
    if (parts.first > parts.last) clear_dq(params, row, lane, kLanes);
  }
}

template <class Traits>
__global__ void __launch_bounds__(kPrologueThreads)
    attention_backward_prologue(const __grid_constant__ CommonParams params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
#endif
  const int thread = thread_index();
  const int worker_of_block = thread / kWorkerThreads;
  const uint32_t workers = gridDim.x * kWorkersPerBlock;
  const uint32_t worker = blockIdx.x * kWorkersPerBlock + worker_of_block;
  static_assert(kBlocksOfLargest <= kPrologueThreads, "a thread for each item that may be split");
  if (blockIdx.x == 0) {
    if (thread == 0) *params.ticket = 0;
    if (thread < kBlocksOfLargest) params.split_turns[thread] = 0;
  }
  const bool reports = params.chunks_done != nullptr;
  const bool leads = thread % kWorkerThreads == 0;
  if (reports && leads) params.chunks_done[worker] = 0;
#if __CUDA_ARCH__ >= 900
  // The main kernel begins when all blocks are here. It reads these words past the L1, and finds
  // them at 0 or what was released later: they are in the L2 before this block lets it begin.
  __threadfence();
  __syncthreads();
  ptx::launch_dependents();
#endif
  const int rows_per_head = params.tiles_q * Traits::kTileQ;
  const auto rows_from_start = [&](int64_t rows) {
    const int64_t heads = rows / rows_per_head;
    return RowPlace{static_cast<int>(heads / params.heads_q),
                    static_cast<int>(heads % params.heads_q),
                    static_cast<int>(rows % rows_per_head)};
  };
  constexpr int64_t kRows = Chunk<Traits>::kRows;
  const RowPlace step = rows_from_start(kRows * workers);
  RowPlace place = rows_from_start(kRows * worker);
  const uint32_t chunks = chunks_of<Traits>(params, params.batch * params.heads_q);
  uint32_t done = 0;
  for (uint32_t chunk = worker; chunk < chunks; chunk += workers) {
    prepare_chunk<Traits>(params, place, rows_per_head);
    place = place.after(params, rows_per_head, step.batch, step.head, step.row);
    if (!reports) continue;
    __syncwarp();  // the barrier counts warps
    ptx::named_barrier_sync(1 + worker_of_block, kWorkerThreads);
    ++done;
    if (leads) ptx::store_release(params.chunks_done + worker, done);
  }
}

}  // namespace flashmoe::attention_backward
