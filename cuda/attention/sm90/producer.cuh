// The producer of dense batches, and of kernels whose keys are split: one thread, which loads Q, K
// and V. ragged_producer.cuh has the producer of sequences.
#pragma once

#include "cuda/attention/sm90/storage.cuh"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/pipeline.cuh"

namespace flashmoe::sm90 {

// Begins to load the keys or values of the step that begins at a row of the tensor. Rows before row
// 0 arrive as zeros.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_step(const CUtensorMap& map, const Repeats& repeats,
                                          const TileOf<Traits>& tile, int row, uint32_t to,
                                          uint32_t full) {
  ptx::mbarrier_arrive_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::tma_load(to + box * Traits::kKVBoxBytes, &map, full, ptx::kEvictLast, box * kBoxColumns,
                  row, tile.head_kv * repeats.head, tile.batch * repeats.batch);
  }
}

// Begins to load the rows of a portion's groups, as far as the tile has these groups. A group holds
// the rows of all packed heads for each of its queries.
template <class Traits>
__device__ __forceinline__ void load_packed_q(const SplitParams& params, const TilePart& tile,
                                              int portion, uint32_t to, uint32_t full) {
  const int begin = portion * Traits::kGroupsPerPortion;
  const int end = min(begin + Traits::kGroupsPerPortion, params.groups_per_tile);
  const int rows = params.queries_per_group * params.packed_heads;
  const int first_row = sequence_of(params, tile.batch).begin_q + tile.first_row;
  ptx::mbarrier_arrive_expect(full, max(0, end - begin) * Traits::kBoxes * rows * kBoxRowBytes);
#pragma unroll 1
  for (int group = begin; group < end; ++group) {
#pragma unroll 1
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::tma_load(to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes, &params.q,
                    full, ptx::kEvictFirst, box * kBoxColumns, tile.head * params.q_repeats.head,
                    first_row + group * params.queries_per_group,
                    tile.head_kv * params.q_repeats.head, tile.batch * params.q_repeats.batch);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void produce(const ParamsOf<Traits>& params, uint32_t shared,
                                        TileOf<Traits>* tiles, const Barriers<Traits>& barriers) {
  using Tile = TileOf<Traits>;
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kStages> v_pipe;
  PipelineState<Traits::kQStages> q_pipe;
  const auto row_of = [&](const Tile& tile, int key) {
    return sequence_of(params, tile.batch).begin_k + key;
  };
  const auto load_k = [&](const Tile& tile, int key) {
    const uint32_t full = barriers.k_full(k_pipe.stage);
    const uint32_t to = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
    ptx::mbarrier_wait(barriers.k_empty(k_pipe.stage), k_pipe.parity ^ 1);
    load_step<Traits, Traits::kBoxes>(params.k, params.k_repeats, tile, row_of(tile, key), to,
                                      full);
    k_pipe.advance();
  };
  const auto load_v = [&](const Tile& tile, int key) {
    const uint32_t full = barriers.v_full(v_pipe.stage);
    const uint32_t to = shared + Traits::kVOffset + v_pipe.stage * Traits::kVBytes;
    ptx::mbarrier_wait(barriers.v_empty(v_pipe.stage), v_pipe.parity ^ 1);
    load_step<Traits, Traits::kBoxesV>(params.v, params.v_repeats, tile, row_of(tile, key), to,
                                       full);
    v_pipe.advance();
  };
  const auto load_q = [&](const Tile& tile, int portion) {
    constexpr int kGroups = Traits::kGroupsPerPortion;
    const uint32_t full = barriers.q_full(q_pipe.stage, portion);
    const uint32_t to = shared + Traits::kQOffset + q_pipe.stage * Traits::kQBytes;
    if constexpr (Traits::kSplit) {
      load_packed_q<Traits>(params, tile, portion, to, full);
    } else {
      const int first_row = sequence_of(params, tile.batch).begin_q + tile.first_row;
      ptx::mbarrier_arrive_expect(full, kGroups * Traits::kQBytesPerGroup);
#pragma unroll
      for (int i = 0; i < kGroups * Traits::kBoxes; ++i) {
        const int group = portion * kGroups + i / Traits::kBoxes;
        const int box = i % Traits::kBoxes;
        ptx::tma_load(to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes, &params.q,
                      full, ptx::kEvictFirst, box * kBoxColumns, first_row + group * kRowsPerGroup,
                      tile.head * params.q_repeats.head, tile.batch * params.q_repeats.batch);
      }
    }
  };
  // Waits until a portion of Q is free for the next tile.
  const auto wait_for_room = [&](int portion) {
    ptx::mbarrier_wait(barriers.q_empty(q_pipe.stage, portion), q_pipe.parity ^ 1);
  };
  // Loads are issued in the order of use: V of a step follows K of the next step, even if that
  // belongs to another tile. A single Q waits longer than K, so K of a tile's first step is loaded
  // before it.
  SchedulerOf<Traits> scheduler(params);
  Tile last_tile;
  int last_key = 0;
  bool pending = false;  // V of last_tile's last step is still to be loaded
  uint32_t sent = 0;
  const auto load_pending = [&] {
    if (pending) load_v(last_tile, last_key);
    pending = false;
  };
  for (Tile tile; scheduler.next(&tile);) {
    const Steps<Traits> steps = steps_of_tile<Traits>(params, tile);
    const bool any = steps.end > 0;
    const int begin = steps.end - Traits::kStepKeys;
    if (Traits::kQStages == 1 && any) load_k(tile, begin);
#pragma unroll
    for (int portion = 0; portion < Traits::kQPortions; ++portion) {
      wait_for_room(portion);
      if (portion == 0) tiles[sent++ % Traits::kTileSlots] = tile;
      load_q(tile, portion);
    }
    q_pipe.advance();
    if (Traits::kQStages > 1 && any) load_k(tile, begin);
    load_pending();
    for (int key = begin; key > steps.first; key -= Traits::kStepKeys) {
      load_k(tile, key - Traits::kStepKeys);
      load_v(tile, key);
    }
    pending = any;
    last_tile = tile;
    last_key = steps.first;
  }
  load_pending();
#pragma unroll
  for (int portion = 0; portion < Traits::kQPortions; ++portion) {
    wait_for_room(portion);
    if (portion == 0) tiles[sent % Traits::kTileSlots].first_row = kNoTile;
    ptx::mbarrier_arrive(barriers.q_full(q_pipe.stage, portion));
  }
}

}  // namespace flashmoe::sm90
