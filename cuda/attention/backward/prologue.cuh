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
// The sums are the diagonal of out * dout^T by the tensor cores: an instruction multiplies 16
// columns of eight rows, where each thread would unpack and add its own, and the lane that has a
// row's sum in the end needs no others'.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

inline constexpr int kWorkerWarps = 4;
inline constexpr int kWorkerThreads = kWorkerWarps * kThreadsPerWarp;
inline constexpr int kPrologueThreads = kWorkersPerBlock * kWorkerThreads;

// What a thread has of a chunk. A warp takes groups of eight rows, of each row four lanes, as the
// fragments of mma.m16n8k16 are; a lane 8 columns of every 32.
template <class Traits>
struct Chunk {
  static constexpr int kGroupRows = 8;
  static constexpr int kColumns = 32;
  static constexpr int kLoads = Traits::kDimV / kColumns;
  static constexpr int kMostLoads = 8;  // in flight, of each of out and dout
  static constexpr int kGroups = smaller(larger(kMostLoads / kLoads, 1),
                                         Traits::kTileQ / (kGroupRows * kWorkerWarps));
  static constexpr int kWarpRows = kGroups * kGroupRows;
  static constexpr int kRows = kWorkerWarps * kWarpRows;
  static_assert(kLoads * kColumns == Traits::kDimV && kLoads <= kMostLoads);
  static_assert(kGroups > 0 && Traits::kTileQ % kRows == 0, "a chunk lies in one tile");

  uint32_t out[kGroups][kLoads][4];
  uint32_t dout[kGroups][kLoads][4];
  float lse[kGroups];
  float dlse[kGroups];

  // The row of a lane among those of the chunk.
  static __device__ __forceinline__ int row_of_lane() {
    const int warp = thread_index() % kWorkerThreads / kThreadsPerWarp;
    return warp * kWarpRows + lane_index() / 4;
  }
};

// The chunks of so many heads.
template <class Traits>
__device__ __forceinline__ uint32_t chunks_of(const CommonParams& params, int heads) {
  constexpr uint32_t kChunksPerTile = Traits::kTileQ / Chunk<Traits>::kRows;
  return static_cast<uint32_t>(heads) * params.tiles_q * kChunksPerTile;
}

// Where a chunk begins, or how far one is from the next.
struct ChunkPlace {
  int batch;
  int head;
  int row;  // of its head

  template <class Traits>
  static __device__ __forceinline__ ChunkPlace of(const CommonParams& params, uint32_t chunk) {
    const uint32_t per_head = chunks_of<Traits>(params, 1);
    const uint32_t head = chunk / per_head;
    const uint32_t batch = head / params.heads_q;
    return {static_cast<int>(batch), static_cast<int>(head - batch * params.heads_q),
            static_cast<int>((chunk - head * per_head) * Chunk<Traits>::kRows)};
  }
  __device__ __forceinline__ void advance(const CommonParams& params, int rows_per_head,
                                          const ChunkPlace& step) {
    row += step.row;
    const int next_head = row >= rows_per_head ? 1 : 0;
    row -= next_head * rows_per_head;
    head += step.head + next_head;
    const int next_batch = head >= params.heads_q ? 1 : 0;
    head -= next_batch * params.heads_q;
    batch += step.batch + next_batch;
  }
};

// `kWhole`: all of its rows exist, and all columns.
template <bool kWhole, class Traits>
__device__ __forceinline__ void load_rows(Chunk<Traits>& chunk, const CommonParams& params,
                                          const ChunkPlace& at) {
  using Share = Chunk<Traits>;
  const int row = at.row + Share::row_of_lane();
  const int column = lane_index() % 4 * 8;
  const auto first = [&](const auto* data, const RowStrides& strides) {
    return data + at.batch * strides.batch + at.head * strides.head + row * strides.seq;
  };
  const uint16_t* out = first(params.out_rows.data, params.out_rows.strides) + column;
  const uint16_t* dout = first(params.dout_rows.data, params.dout_rows.strides) + column;
#pragma unroll
  for (int group = 0; group < Share::kGroups; ++group) {
    const bool exists = kWhole || row + group * Share::kGroupRows < params.seq_q;
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
  const auto load_numbers = [&](float(&numbers)[Share::kGroups], const float* data,
                                const RowStrides& strides) {
    const float* number = first(data, strides);
#pragma unroll
    for (int group = 0; group < Share::kGroups; ++group) {
      const bool exists = kWhole || row + group * Share::kGroupRows < params.seq_q;
      numbers[group] = exists ? *number : 0.0f;
      number += Share::kGroupRows * strides.seq;
    }
  };
  load_numbers(chunk.lse, params.lse, params.lse_strides);
  if (params.dlse != nullptr) load_numbers(chunk.dlse, params.dlse, params.dlse_strides);
}

template <class Traits>
__device__ __forceinline__ void load_chunk(Chunk<Traits>& chunk, const CommonParams& params,
                                           const ChunkPlace& at) {
  if (params.dim_v == Traits::kDimV && at.row + Chunk<Traits>::kRows <= params.seq_q) {
    load_rows<true>(chunk, params, at);
  } else {
    load_rows<false>(chunk, params, at);
  }
}

template <class Traits>
__device__ __forceinline__ void write_rows(const Chunk<Traits>& chunk, const CommonParams& params,
                                           const ChunkPlace& at, int rows_per_head) {
  using Share = Chunk<Traits>;
  using Element = typename Traits::Element;
  const int lane = lane_index();
  const int first_row = at.row + Share::row_of_lane();
  const int64_t first =
      static_cast<int64_t>(at.batch * params.heads_q + at.head) * rows_per_head + first_row;
#pragma unroll
  for (int group = 0; group < Share::kGroups; ++group) {
    // Rows 8 to 15 of the products are not used. Two sums, so that one is added to meanwhile.
    float even[4] = {};
    float odd[4] = {};
#pragma unroll
    for (int load = 0; load < Share::kLoads; ++load) {
      const uint32_t(&out)[4] = chunk.out[group][load];
      const uint32_t(&dout)[4] = chunk.dout[group][load];
      ptx::mma_m16n8k16<Element>(even, {out[0], 0, out[1], 0}, dout[0], dout[1]);
      ptx::mma_m16n8k16<Element>(odd, {out[2], 0, out[3], 0}, dout[2], dout[3]);
    }
    const float delta = lane / 4 % 2 == 0 ? even[0] + odd[0] : even[1] + odd[1];
    const int row = first_row + group * Share::kGroupRows;
    const bool sees = row < params.seq_q && params.score.sees_keys(row, params.seq_k);
    // The lane that has the diagonal's number of the row.
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
  const Parts parts = Parts::of<Traits>(params, at.row / Traits::kTileQ);
  if (parts.first <= parts.last) return;
  const int warp = thread_index() % kWorkerThreads / kThreadsPerWarp;
  const int end = min(at.row + Chunk<Traits>::kRows, params.seq_q);
  for (int row = at.row + warp; row < end; row += kWorkerWarps) {
    const int64_t place =
        at.batch * dq.strides.batch + at.head * dq.strides.head + row * dq.strides.seq;
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
  const int thread_of_worker = thread % kWorkerThreads;
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
  if (worker >= chunks) return;
  const int rows_per_head = params.tiles_q * Traits::kTileQ;
  const bool clears = params.score.blind_rows != 0 && params.accumulate == 0 &&
                      params.dq_rows.rows != nullptr;
  const ChunkPlace step = ChunkPlace::of<Traits>(params, workers);
  ChunkPlace at = ChunkPlace::of<Traits>(params, worker);
  Chunk<Traits> chunk;
  load_chunk(chunk, params, at);
  uint32_t done = 0;
  for (uint32_t index = worker;;) {
    write_rows(chunk, params, at, rows_per_head);
    static_assert(Traits::kPanels <= kWorkerThreads);
    if (at.row % Traits::kTileQ == 0 && thread_of_worker < Traits::kPanels) {
      const int tile =
          (at.batch * params.heads_q + at.head) * params.tiles_q + at.row / Traits::kTileQ;
      params.turns[tile * Traits::kPanels + thread_of_worker] = 0;
    }
    if (clears) clear_dq<Traits>(params, at);
    // Below 2^32: there are at most 2^31 chunks.
    index += workers;
    const bool more = index < chunks;
    if (more) {
      at.advance(params, rows_per_head, step);
      load_chunk(chunk, params, at);
    }
    if (reports) {
      __syncwarp();  // the barrier counts warps
      ptx::named_barrier_sync(1 + worker_of_block, kWorkerThreads);
      ++done;
      if (leads) ptx::store_release(params.chunks_done + worker, done);
    }
    if (!more) break;
  }
}

}  // namespace flashmoe::attention_backward
