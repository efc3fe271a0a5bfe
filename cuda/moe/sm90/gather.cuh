// The warps that gather rows of tokens by cp.async.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/scheduler.cuh"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/pipeline.cuh"

namespace flashmoe::moe::sm90 {

inline constexpr uint32_t kNoRow = 0xffffffffu;

// The address of the chunk of 16 bytes that is `chunks` chunks behind `base`. It is computed anew
// in every step: the compiler would keep 64 bits for each row.
__device__ __forceinline__ const uint16_t* chunk_at(const uint16_t* base, uint32_t chunks) {
  const uint16_t* address;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(chunks), "l"(base));
  return address;
}

// Offsets of rows of x, in chunks of 16 bytes, or kNoRow, for the next tile of the gathering
// threads. The table is in shared memory.
template <class Traits>
struct NextRows {
  static constexpr int kRows = Traits::kTileTokens / Traits::kGatherThreads;  // per thread
  static_assert(Traits::kTileTokens % Traits::kGatherThreads == 0);
  int pairs[kRows];

  // Begins to load the rows' pairs.
  __device__ __forceinline__ void request(const Params& params, const Tile& tile, int thread) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread + i * Traits::kGatherThreads;
      pairs[i] = kNone;
      if (row < tile.tokens) pairs[i] = params.pairs[tile.first_slot + row];
    }
  }
  __device__ __forceinline__ void store(const Params& params, uint32_t table, int thread) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t offset = kNoRow;
      if (pairs[i] >= 0 && pairs[i] < params.rows) {
        offset = static_cast<uint32_t>(pairs[i] / params.top_k) * params.x_row_chunks;
      }
      ptx::store_shared(table + 4 * (thread + i * Traits::kGatherThreads), offset);
    }
  }
};

// Gathers rows of x by threads 0 to kGatherThreads - 1 of some whole warps. Eight threads copy the
// 128 bytes of a row in a step. The rows of the next tile are looked up while this one is copied.
template <class Traits>
__device__ __forceinline__ void gather(const Params& params, const Shared<Traits>& shared,
                                       int thread) {
  constexpr int kChunk = 8;  // elements per 16 bytes
  constexpr int kThreadsPerRow = kBoxColumns / kChunk;
  constexpr int kRowsApart = Traits::kGatherThreads / kThreadsPerRow;
  constexpr int kRows = Traits::kTileTokens / kRowsApart;
  constexpr int kStoreStep = 2;  // step by which the loads requested in the first step have arrived
  static_assert(kRowsApart % 8 == 4, "every second row of a thread has the same swizzle");
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int steps = ceil_div<Traits::kStep>(params.columns);
  const int store_step = min(kStoreStep, steps - 1);
  const int chunk = thread % kThreadsPerRow;
  const int first_row = thread / kThreadsPerRow;
  const uint32_t places[2] = {
      static_cast<uint32_t>(first_row * kBoxRowBytes + (chunk ^ (first_row % 8)) * 16),
      static_cast<uint32_t>(first_row * kBoxRowBytes + (chunk ^ ((first_row + 4) % 8)) * 16)};
  const uint32_t table = shared.base + Traits::kRowsOffset;
  Scheduler<Traits> scheduler(params);
  PipelineState<Traits::kStages> pipe;
  NextRows<Traits> next;
  Tile tile;
  int item = first_item();
  bool more = scheduler.find(item, rank, &tile);
  if (more) {
    next.request(params, tile, thread);
    next.store(params, table, thread);
  }
  while (more) {
    ptx::named_barrier_sync(kGatherBarrier, Traits::kGatherThreads);
    uint32_t offsets[kRows];  // of the rows of x, in chunks
    uint32_t known = 0;       // one bit per row that has a token
    // If a tile is wider than its tokens, zeros follow them: code that computes two columns at once
    // must not depend on old data.
    const int rows = tile.units * kUnitTokens - first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offsets[i] = ptx::load_shared_uint(table + 4 * (first_row + i * kRowsApart));
      if (offsets[i] == kNoRow) {
        offsets[i] = 0;
      } else {
        known |= 1u << i;
      }
    }
    ptx::named_barrier_sync(kGatherBarrier, Traits::kGatherThreads);
    const int steps_behind = Traits::steps_behind(tile.units);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int column = step * Traits::kStep + chunk * kChunk;
      const uint32_t valid = column < params.columns ? known : 0;
      const uint16_t* const source = params.x + column;
      const uint32_t destination = shared.tokens(pipe.stage);
      ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i * kRowsApart < rows) {
          ptx::cp_async_16_or_zero(destination + places[i % 2] + i * kRowsApart * kBoxRowBytes,
                                   chunk_at(source, offsets[i]), (valid & (1u << i)) != 0);
        }
      }
      ptx::cp_async_arrive(shared.full(pipe.stage));
      pipe.advance();
      if (step == 0) {
        item += item_stride();
        more = scheduler.find(item, rank, &tile);
        if (more) next.request(params, tile, thread);
      }
      if (step == store_step && more) next.store(params, table, thread);
    }
    // Steps whose data comes by TMA alone.
#pragma unroll 1
    for (int step = 0; step < steps_behind; ++step) {
      ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
      ptx::mbarrier_arrive(shared.full(pipe.stage));
      pipe.advance();
    }
  }
}

}  // namespace flashmoe::moe::sm90
