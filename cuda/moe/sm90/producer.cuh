// The producer warp that loads by TMA: weights, and tokens in contiguous rows.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/progress.cuh"
#include "cuda/moe/sm90/scheduler.cuh"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/pipeline.cuh"

namespace flashmoe::moe::sm90 {

inline constexpr uint16_t kWholeCluster = (1 << kCluster) - 1;
// When the next item is taken, and the other block is told: in steps before the end of a tile.
inline constexpr int kTakeSteps = 6;
inline constexpr int kTellSteps = 2;

// The TMA copies of one tile, with everything that its steps share precomputed: consumers may have
// to wait for the time between the release of a stage and the copy to it.
template <class Traits>
struct TileCopies {
  const Params& params;
  const Shared<Traits>& shared;
  uint64_t policy;    // for weights
  uint32_t expected;  // bytes that a stage expects
  int expert;
  int row;  // first row of the weights
  int first_slot;
  int only_half;  // the half that this block copies for both; kNone: it copies both halves for
                  // itself
  int token_row;  // first row of this block's half of the tokens
  int token_batch;
  uint32_t token_offset;
  const CUtensorMap* tokens;

  // Whole warps call it. `rank` is known to be uniform.
  __device__ __forceinline__ TileCopies(const Params& params_, const Shared<Traits>& shared_,
                                        const Tile& tile, int rank)
      : params(params_), shared(shared_) {
    policy = uniform(tile.reused) != 0 ? ptx::kEvictNormal : ptx::kEvictFirst;
    expected = Traits::kKeeps ? 0 : Traits::kWeightBytes;
    expert = uniform(tile.expert);
    row = uniform(tile.row_tile) * Traits::kRowsToTile;
    first_slot = uniform(tile.first_slot);
    only_half = Traits::kGathers && uniform(tile.shared) != 0 ? rank : kNone;
    if (!Traits::kGathers) {
      const int units = uniform(tile.units);
      expected += units * kUnitTokens * kBoxRowBytes;
      const int half_tokens = units * (kUnitTokens / kCluster);
      token_row = first_slot + rank * half_tokens;
      token_batch = params.counts != nullptr ? expert : 0;
      token_offset = rank * half_tokens * kBoxRowBytes;
      tokens = &params.tokens[units - 1];
    }
  }

  __device__ __forceinline__ void copy(int stage, uint32_t offset, const CUtensorMap& map,
                                       int column, int first_row, bool both) const {
    const uint32_t to = shared.weights(stage) + offset;
    const int c0 = Traits::kTransposed ? first_row : column;
    const int c1 = Traits::kTransposed ? column : first_row;
    if (both) {
      ptx::tma_load_multicast(to, &map, shared.full(stage), policy, kWholeCluster, c0, c1, expert,
                              0);
    } else {
      ptx::tma_load(to, &map, shared.full(stage), policy, c0, c1, expert, 0);
    }
  }

  // Expects the bytes of a stage, and copies the weights of a step. One thread calls it.
  __device__ __forceinline__ void load_weights(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), static_cast<int>(expected));
    copy_weights(stage, step);
  }

  __device__ __forceinline__ void copy_weights(int stage, int step) const {
    const int column = step * Traits::kStep;
    if constexpr (!Traits::kGathers) {
#pragma unroll
      for (int i = 0; i < Traits::kTileRows / Traits::kBoxRows; ++i) {
        copy(stage, i * Traits::kBoxBytes, params.weights[0], column, row + i * Traits::kRowsToBox,
             false);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Traits::kHalfRows / Traits::kBoxRows; ++i) {
        const int box_row = row + i * Traits::kRowsToBox;
        const uint32_t offset = i * Traits::kBoxBytes;
        if (only_half != kNone) {
          copy(stage, offset + only_half * Traits::kHalfBytes, params.weights[only_half], column,
               box_row + only_half * Traits::kRowsToHalf, true);
        } else {
          copy(stage, offset, params.weights[0], column, box_row, false);
          copy(stage, offset + Traits::kHalfBytes, params.weights[1], column,
               box_row + Traits::kRowsToHalf, false);
        }
      }
    }
  }

  // Kept weights have stages of their own.
  __device__ __forceinline__ void load_kept_weights(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), Traits::kWeightBytes);
    copy_weights(stage, step);
  }
  __device__ __forceinline__ void load_only_tokens(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), static_cast<int>(expected));
    load_tokens(stage, step);
  }

  // Loads a step after the products: g and u of its tokens, and the data of their slots.
  __device__ __forceinline__ void load_before(int stage, int step) const {
    const uint32_t full = shared.full(stage);
    const uint32_t to = shared.weights(stage);
    const int slot = first_slot + step * kGradientTokens;
    const int aligned = slot / 4 * 4;
    ptx::mbarrier_arrive_expect(full, 2 * Traits::kUpBoxesOffset + 2 * Traits::kSlotBytes);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int box = 0; box < Traits::kBoxes; ++box) {
        ptx::tma_load(to + i * Traits::kUpBoxesOffset + box * Traits::kOutBytes, &params.before[i],
                      full, ptx::kEvictFirst, row + box * kBoxColumns, slot, 0, 0);
      }
    }
    ptx::bulk_load(to + Traits::kSlotTokensOffset, params.pairs + aligned, Traits::kSlotBytes, full,
                   ptx::kEvictNormal);
    ptx::bulk_load(to + Traits::kSlotWeightsOffset, params.row_weights + aligned,
                   Traits::kSlotBytes, full, ptx::kEvictNormal);
  }

  // Copies this block's half of a step's tokens for both blocks. One thread calls it.
  __device__ __forceinline__ void load_tokens(int stage, int step) const {
    if (Traits::kGathers) return;
    ptx::tma_load_multicast(shared.tokens(stage) + token_offset, tokens, shared.full(stage),
                            ptx::kEvictNormal, kWholeCluster, step * Traits::kStep, token_row,
                            token_batch, 0);
  }
};

// While `up` waits for routing: prefetches into the L2 the weights that this block will probably
// begin with. If routing turns out otherwise, the prefetch was in vain. With fewer tokens per
// expert than kFewTokens, some experts are likely to have none. One thread calls it.
template <class Traits>
__device__ __forceinline__ void fetch_ahead(const Params& params) {
  constexpr int kFewTokens = 4;
  constexpr int kStepsAhead = 6;  // some 25 MB on an H200
  if (params.rows / kFewTokens < params.experts) return;
  const int rank = static_cast<int>(ptx::cluster_rank());
  Tile tile;
  if (!Scheduler<Traits>::guess(params, first_item(), rank, &tile)) return;
  const int steps = min(ceil_div<Traits::kStep>(params.columns), kStepsAhead);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    for (int half = 0; half < kHalves; ++half) {
      if (tile.shared != 0 && half != rank) continue;
      for (int i = 0; i < Traits::kHalfRows / Traits::kBoxRows; ++i) {
        const int column = step * Traits::kStep;
        const int row = tile.row_tile * Traits::kRowsToTile + half * Traits::kRowsToHalf +
                        i * Traits::kRowsToBox;
        ptx::tma_prefetch(&params.weights[half], Traits::kTransposed ? row : column,
                          Traits::kTransposed ? column : row, tile.expert, 0);
      }
    }
  }
}

// After all copies: waits until both blocks of the cluster have released all stages. A block must
// not end before the other block's arrivals at its barriers. `up` keeps its last stage.
template <class Traits>
__device__ __forceinline__ void wait_given_back(const Shared<Traits>& shared,
                                                PipelineState<Traits::kStages> pipe) {
#pragma unroll 1
  for (int stage = Traits::kGathers ? 1 : 0; stage < Traits::kStages; ++stage) {
    ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
    pipe.advance();
  }
}

// Issues the copies by TMA. One warp runs it. A layer's `down` begins while `up` still runs.
// Kernels before `up` have ended, because `up` waited for them before it let this kernel begin.
template <class Traits>
__device__ __forceinline__ void produce(const Params& params, const Shared<Traits>& shared) {
  const int rank = uniform(static_cast<int>(ptx::cluster_rank()));
  const bool leader = threadIdx.x == 0;
  const int steps = ceil_div<Traits::kStep>(params.columns);
  const bool follows = !Traits::kGathers && params.progress != nullptr;
  if (!Traits::kGathers && !follows) ptx::wait_for_dependencies();
  // In a tile this short, an item taken now would arrive too late.
  const bool few_steps = !Traits::kGathers && steps < 2 * kTakeSteps;
  Deal<Traits> deal(params, shared, rank);
  if (few_steps) deal.take();
  Scheduler<Traits> scheduler(params);
  Progress progress;
  PipelineState<Traits::kStages> pipe;
  Tile tile = {};
  int sent = 0;
  int item = first_item();
  int step = 0;  // next step of this tile
  bool more = scheduler.find(item, rank, &tile);
  if (follows && more) {
    step = min(steps, Traits::kStages);
    const TileCopies<Traits> copies(params, shared, tile, rank);
    if (ptx::elect_one()) {
#pragma unroll 1
      for (int i = 0; i < step; ++i) copies.load_weights(i, i);
    }
    progress.wait_for(params, scheduler.needed());
    if (ptx::elect_one()) {
#pragma unroll 1
      for (int i = 0; i < step; ++i) copies.load_tokens(i, i);
    }
    __syncwarp();
    pipe.advance(step);
  }
  while (more) {
    const TileCopies<Traits> copies(params, shared, tile, rank);
    pipe.stage = uniform(pipe.stage);
    if (leader) publish(shared, sent, tile);
    if (follows) progress.wait_for(params, scheduler.needed());
    const auto load_until = [&](int end) {
#pragma unroll 1
      for (; step < end; ++step) {
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (ptx::elect_one()) {
          copies.load_weights(pipe.stage, step);
          copies.load_tokens(pipe.stage, step);
        }
        __syncwarp();
        pipe.advance();
      }
    };
    if (few_steps) {
      deal.tell(sent);
      deal.take();
    } else if (!Traits::kGathers) {
      load_until(steps - kTakeSteps);
      deal.take();
      load_until(steps - kTellSteps);
      deal.tell(sent);
    }
    load_until(steps);
    if constexpr (Traits::kDifferentiates) {
      const int steps_behind = Traits::steps_behind(tile.units);
#pragma unroll 1
      for (int behind = 0; behind < steps_behind; ++behind) {
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (ptx::elect_one()) copies.load_before(pipe.stage, behind);
        __syncwarp();
        pipe.advance();
      }
    }
    step = 0;
    item = deal.item_after(item, sent);
    ++sent;
    more = scheduler.find(item, rank, &tile);
  }
  if (leader) {
    tile.units = 0;
    for (int end = 0; end < (Traits::kAlternates ? kConsumers : 1); ++end) {
      tile.edge = end == 0;
      publish(shared, sent + end, tile);
    }
  }
  __syncwarp();
  wait_given_back(shared, pipe);
}

// The same with kept weights: a run's weights come first, in stages of their own, then the tokens
// of one of its tiles after another.
template <class Traits>
__device__ __forceinline__ void produce_runs(const Params& params, const Shared<Traits>& shared) {
  constexpr int kSteps = Traits::kKeptSteps;
  constexpr int kTellStep = kSteps - 1;  // of the last tile of a run
  const int rank = uniform(static_cast<int>(ptx::cluster_rank()));
  const bool leader = threadIdx.x == 0;
  const bool follows = params.progress != nullptr;
  if (!follows) ptx::wait_for_dependencies();
  Deal<Traits> deal(params, shared, rank);
  Scheduler<Traits> scheduler(params);
  Progress progress;
  PipelineState<Traits::kStages> pipe;
  Tile tile = {};
  Run run;
  int sent = 0;
  bool more = scheduler.find(first_item(), rank, &run);
  for (int number = 0; more; ++number) {
    for (bool begins = true; run.next < run.end; ++run.next, begins = false) {
      scheduler.place(run, begins, &tile);
      if (leader) publish(shared, sent, tile);
      ++sent;
      pipe.stage = uniform(pipe.stage);
      if (begins) {
        const TileCopies<Traits> copies(params, shared, tile, rank);
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
          if (ptx::elect_one()) copies.load_kept_weights(pipe.stage, step);
          __syncwarp();
          pipe.advance();
        }
        if (follows) progress.wait_for(params, scheduler.needed());
      }
      const TileCopies<Traits> copies(params, shared, tile, rank);
      const bool last = run.next + 1 == run.end;
      if (last) deal.take();
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        if (last && step == kTellStep) deal.tell(number);
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (ptx::elect_one()) copies.load_only_tokens(pipe.stage, step);
        __syncwarp();
        pipe.advance();
      }
    }
    const int item = first_item() + number * item_stride();  // if items are not taken dynamically
    more = scheduler.find(deal.item_after(item, number), rank, &run);
  }
  if (leader) {
    tile.units = 0;
    publish(shared, sent, tile);
  }
  __syncwarp();
  wait_given_back(shared, pipe);
}

}  // namespace flashmoe::moe::sm90
