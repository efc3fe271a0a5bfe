// What the main kernel needs of each row before it starts: lse * log2(e) and sum(dout * out) -
// dlse. It also sets the turns and the ticket to zero, and dQ of tiles whose rows see no key.
//
// Workers of four warps take chunks of rows in turns, in the order of heads. On Hopper the prologue
// has few blocks and the main kernel begins beside it, by a programmatic launch: an item waits for
// the rows of its heads alone (rows_ready.cuh). The prologue is bound by memory, the main kernel by
// its products, so most of the first costs nothing, as long as a few multiprocessors reach the
// memory's speed. So a chunk has few instructions, and its loads are on their way while the one
// before it is reported.
//
// The sums are the diagonal of out * dout^T by the tensor cores: an instruction adds 8
// columns of eight rows, which each thread would have to unpack first, and no lane needs the sum of
// another.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mma_k8.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

inline constexpr int kWorkerWarps = 4;
inline constexpr int kWorkerThreads = kWorkerWarps * kThreadsPerWarp;
inline constexpr int kPrologueThreads = kWorkersPerBlock * kWorkerThreads;

__device__ __forceinline__ uint32_t warp_of_worker() {
  return threadIdx.x / kThreadsPerWarp % kWorkerWarps;
}

// What a thread has of a chunk. A warp takes groups of eight rows, of each row four lanes, as the
// fragments of mma.m16n8k8 are; a lane 8 columns of every 32.
template <class Traits>
struct Chunk {
  static constexpr int kGroupRows = 8;
  static constexpr int kColumns = 32;
  static constexpr int kLoads = Traits::kDimV / kColumns;
  static constexpr int kMostLoads = 8;  // in flight, of each of out and dout
  static constexpr int kGroups =
      smaller(larger(kMostLoads / kLoads, 1), Traits::kTileQ / (kGroupRows * kWorkerWarps));
  static constexpr int kWarpRows = kGroups * kGroupRows;
  static constexpr int kRows = kWorkerWarps * kWarpRows;
  static_assert(kLoads * kColumns == Traits::kDimV && kLoads <= kMostLoads);
  static_assert(kGroups > 0 && Traits::kTileQ % kRows == 0, "a chunk lies in one tile");

  uint32_t out[kGroups][kLoads][4];
  uint32_t dout[kGroups][kLoads][4];
  float lse[kGroups];
  float dlse[kGroups];

  // The row of a lane among those of the chunk.
  static __device__ __forceinline__ uint32_t row_of_lane() {
    return warp_of_worker() * kWarpRows + lane_index() / 4;
  }
};

// The chunks of so many heads.
template <class Traits>
__device__ __forceinline__ uint32_t chunks_of(const CommonParams& params, int heads) {
  constexpr uint32_t kChunksPerTile = Traits::kTileQ / Chunk<Traits>::kRows;
  return static_cast<uint32_t>(heads) * params.tiles_q * kChunksPerTile;
}

// Where a chunk begins, or how far one is from the next. Unsigned, for one multiplication less in
// each address.
struct ChunkPlace {
  uint32_t batch;
  uint32_t head;
  uint32_t row;  // of its head

  template <class Traits>
  static __device__ __forceinline__ ChunkPlace of(const CommonParams& params, uint32_t chunk) {
    const uint32_t per_head = chunks_of<Traits>(params, 1);
    const uint32_t head = chunk / per_head;
    const uint32_t batch = head / params.heads_q;
    return {batch, head - batch * params.heads_q, (chunk - head * per_head) * Chunk<Traits>::kRows};
  }
  __device__ __forceinline__ void advance(const CommonParams& params, uint32_t rows_per_head,
                                          const ChunkPlace& step) {
    row += step.row;
    const bool next_head = row >= rows_per_head;
    if (next_head) row -= rows_per_head;
    head += step.head + (next_head ? 1 : 0);
    const bool next_batch = head >= static_cast<uint32_t>(params.heads_q);
    if (next_batch) head -= params.heads_q;
    batch += step.batch + (next_batch ? 1 : 0);
  }
  __device__ __forceinline__ uint32_t head_of_all(const CommonParams& params) const {
    return batch * params.heads_q + head;
  }
  // So many rows on.
  __device__ __forceinline__ int64_t offset(const RowStrides& strides, uint32_t rows) const {
    return batch * strides.batch + head * strides.head + (row + rows) * strides.seq;
  }
};

// `kWhole`: all of its rows exist, and all columns.
template <bool kWhole, class Traits>
__device__ __forceinline__ void load_rows(Chunk<Traits>& chunk, const CommonParams& params,
                                          const ChunkPlace& at) {
  using Share = Chunk<Traits>;
  const uint32_t row = Share::row_of_lane();
  const int column = lane_index() % 4 * 8;
  const uint16_t* out = params.out_rows.data + column + at.offset(params.out_rows.strides, row);
  const uint16_t* dout = params.dout_rows.data + column + at.offset(params.dout_rows.strides, row);
#pragma unroll
  for (int group = 0; group < Share::kGroups; ++group) {
    const uint32_t this_row = at.row + row + group * Share::kGroupRows;
    const bool exists = kWhole || this_row < static_cast<uint32_t>(params.seq_q);
#pragma unroll
    for (int load = 0; load < Share::kLoads; ++load) {
      const int columns = load * Share::kColumns;
      const bool valid = kWhole || (exists && column + columns < params.dim_v);
      ptx::load_streaming_or_zero(chunk.out[group][load], out + columns, valid);
      ptx::load_streaming_or_zero(chunk.dout[group][load], dout + columns, valid);
    }
    out += Share::kGroupRows * params.out_rows.strides.seq;
    dout += Share::kGroupRows * params.dout_rows.strides.seq;
  }
}

template <class Traits>
__device__ __forceinline__ void load_numbers(float (&numbers)[Chunk<Traits>::kGroups],
                                             const float* data, const RowStrides& strides,
                                             const CommonParams& params, const ChunkPlace& at) {
  using Share = Chunk<Traits>;
  const uint32_t row = Share::row_of_lane();
  const float* number = data + at.offset(strides, row);
#pragma unroll
  for (int group = 0; group < Share::kGroups; ++group) {
    const uint32_t this_row = at.row + row + group * Share::kGroupRows;
    numbers[group] = this_row < static_cast<uint32_t>(params.seq_q) ? *number : 0.0f;
    number += Share::kGroupRows * strides.seq;
  }
}

template <class Traits>
__device__ __forceinline__ void load_chunk(Chunk<Traits>& chunk, const CommonParams& params,
                                           const ChunkPlace& at) {
  const bool rows_exist = at.row + Chunk<Traits>::kRows <= static_cast<uint32_t>(params.seq_q);
  if (rows_exist && params.dim_v == Traits::kDimV) {
    load_rows<true>(chunk, params, at);
  } else {
    load_rows<false>(chunk, params, at);
  }
  load_numbers<Traits>(chunk.lse, params.lse, params.lse_strides, params, at);
  if (params.dlse != nullptr) {
    load_numbers<Traits>(chunk.dlse, params.dlse, params.dlse_strides, params, at);
  }
}

template <class Traits>
__device__ __forceinline__ void write_rows(const Chunk<Traits>& chunk, const CommonParams& params,
                                           const ChunkPlace& at, uint32_t rows_per_head) {
  using Share = Chunk<Traits>;
  using Element = typename Traits::Element;
  const int lane = lane_index();
  const uint32_t first_row = at.row + Share::row_of_lane();
  const uint64_t first = static_cast<uint64_t>(at.head_of_all(params)) * rows_per_head + first_row;
#pragma unroll
  for (int group = 0; group < Share::kGroups; ++group) {
    // A lane's registers are pairs of columns of one row of out, which the products take for two
    // rows, 8 apart: the first of two goes with the first of dout, the second with the second. What
    // else the products make is not used.
    float first_pairs[4] = {};
    float second_pairs[4] = {};
#pragma unroll
    for (int load = 0; load < Share::kLoads; ++load) {
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const uint32_t out[2] = {chunk.out[group][load][half], chunk.out[group][load][half + 1]};
        ptx::mma_m16n8k8<Element>(first_pairs, out, chunk.dout[group][load][half]);
        ptx::mma_m16n8k8<Element>(second_pairs, out, chunk.dout[group][load][half + 1]);
      }
    }
    // Of the diagonal, a lane has one number, or none.
    const float delta =
        lane / 4 % 2 == 0 ? first_pairs[0] + second_pairs[2] : first_pairs[1] + second_pairs[3];
    const int row = static_cast<int>(first_row) + group * Share::kGroupRows;
    const bool sees = row < params.seq_q && params.score.sees_keys(row, params.seq_k);
    if (lane % 4 == lane / 8) {
      const float dlse = params.dlse != nullptr ? chunk.dlse[group] : 0.0f;
      params.row_lse[first + group * Share::kGroupRows] =
          sees ? chunk.lse[group] * kLog2E : INFINITY;
      params.row_delta[first + group * Share::kGroupRows] = sees ? delta - dlse : 0.0f;
    }
  }
}

// dQ of rows that see no key, where no part of the tile is ever added.
template <class Traits>
__device__ __forceinline__ void clear_dq(const CommonParams& params, const ChunkPlace& at) {
  const Gradient& dq = params.dq_rows;
  const Parts parts = Parts::of<Traits>(params, static_cast<int>(at.row / Traits::kTileQ));
  if (parts.first <= parts.last) return;
  for (uint32_t row = warp_of_worker(); row < Chunk<Traits>::kRows; row += kWorkerWarps) {
    if (at.row + row >= static_cast<uint32_t>(params.seq_q)) return;
    const int64_t place = at.offset(dq.strides, row);
    for (int c = lane_index(); c < params.dim; c += kThreadsPerWarp) {
      if (dq.fp32 != 0) {
        static_cast<float*>(dq.rows)[place + c] = 0.0f;
      } else {
        static_cast<uint16_t*>(dq.rows)[place + c] = 0;
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kPrologueThreads)
    attention_backward_prologue(const __grid_constant__ CommonParams params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
#endif
  const auto thread = static_cast<uint32_t>(thread_index());
  const uint32_t worker_of_block = thread / kWorkerThreads;
  const uint32_t workers = gridDim.x * kWorkersPerBlock;
  const uint32_t worker = blockIdx.x * kWorkersPerBlock + worker_of_block;
  static_assert(kBlocksOfLargest <= kPrologueThreads, "a thread for each item that may be split");
  if (blockIdx.x == 0) {
    if (thread == 0) *params.ticket = 0;
    if (thread < kBlocksOfLargest) params.split_turns[thread] = 0;
  }
  const bool reports = params.chunks_done != nullptr;
  const uint32_t thread_of_worker = thread % kWorkerThreads;
  const bool leads = thread_of_worker == 0;
  if (reports && leads) params.chunks_done[worker] = 0;
#if __CUDA_ARCH__ >= 900
  // The main kernel begins when all blocks are here. It reads these words past the L1, and finds
  // them at 0 or what was released later: they are in the L2 before this block lets it begin.
  __threadfence();
  __syncthreads();
  ptx::launch_dependents();
#endif
  const uint32_t chunks = chunks_of<Traits>(params, params.batch * params.heads_q);
  const uint32_t rows_per_head = params.tiles_q * Traits::kTileQ;
  const bool clears =
      params.score.blind_rows != 0 && params.accumulate == 0 && params.dq_rows.rows != nullptr;
  const ChunkPlace step = ChunkPlace::of<Traits>(params, workers);
  ChunkPlace at = ChunkPlace::of<Traits>(params, worker);
  uint32_t done = 0;
  const auto report = [&] {
    if (!reports) return;
    __syncwarp();  // the barrier counts warps
    ptx::named_barrier_sync(1 + worker_of_block, kWorkerThreads);
    if (leads) ptx::store_release(params.chunks_done + worker, done);
  };
  // Below 2^32: there are at most 2^31 chunks.
  for (uint32_t index = worker; index < chunks; index += workers) {
    Chunk<Traits> chunk;
    load_chunk(chunk, params, at);
    if (done > 0) report();
    write_rows(chunk, params, at, rows_per_head);
    static_assert(Traits::kPanels <= kWorkerThreads);
    if (at.row % Traits::kTileQ == 0 && thread_of_worker < Traits::kPanels) {
      const uint32_t tile = at.head_of_all(params) * params.tiles_q + at.row / Traits::kTileQ;
      params.turns[tile * Traits::kPanels + thread_of_worker] = 0;
    }
    if (clears) clear_dq<Traits>(params, at);
    at.advance(params, rows_per_head, step);
    ++done;
  }
  if (done > 0) report();
}

}  // namespace flashmoe::attention_backward
