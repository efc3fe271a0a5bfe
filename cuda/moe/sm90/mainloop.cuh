// The products of a consumer warpgroup: its state, the main loop, and the main loop with weights in
// registers.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/proxy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pipeline.cuh"

namespace flashmoe::moe::sm90 {

// The step of a tile in which `up` announces that the previous tile is stored.
inline constexpr int kAnnounceStep = 3;

// A consumer thread's products of a tile of kTokens tokens: of 64 rows of each half.
template <int kTokens>
struct Products {
  float first[kTokens / 2];
  float second[kTokens / 2];
};

// The state of a consumer warpgroup, and its main loops.
template <class Traits>
struct MainLoop {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;

  const Params& params;
  const Shared<Traits>& shared;
  int group;
  PipelineState<Traits::kStages> pipe;
  int held = kNone;  // the last stage of the previous tile, through which its output is stored
  int tile_number = 0;
  int sent = 0;  // parts of the output: of this tile in `up`, otherwise of all tiles

  __device__ __forceinline__ MainLoop(const Params& params_, const Shared<Traits>& shared_,
                                      int group_)
      : params(params_), shared(shared_), group(group_) {}

  // Rows of earlier consumers in each half of the tile.
  __device__ __forceinline__ int rows_before() const {
    return Traits::kAlternates ? 0 : group * kConsumerRows;
  }

  // Releases a stage of this warp in both blocks of the cluster.
  __device__ __forceinline__ void release(int stage) const {
    if (ptx::elect_one()) {
#pragma unroll
      for (uint32_t rank = 0; rank < kCluster; ++rank) {
        ptx::mbarrier_arrive_cluster(ptx::map_to_rank(shared.empty(stage), rank));
      }
    }
  }

  __device__ __forceinline__ int stage_before() const {
    return pipe.stage == 0 ? Traits::kStages - 1 : pipe.stage - 1;
  }

  // Announces to `down` that one more tile of this consumer is stored.
  __device__ __forceinline__ void announce() const {
    if (warp_of_group() == 0) {
      if (lane_index() == 0) {
        // This thread sees the stores when they are written, and the release makes others see them.
        ptx::tma_store_wait();
        ptx::fence_proxy_async_global();
        ptx::add_release(params.progress + blockIdx.x * kConsumers + group, 1);
      }
      __syncwarp();
    }
  }

  // Releases the stage through which the last tile's output was stored.
  __device__ __forceinline__ void give_back() const {
    if (Traits::kDifferentiates ? tile_number == 0 : held == kNone) return;
    if (Traits::kDifferentiates || warp_of_group() == 0) {
      if (lane_index() == 0) ptx::tma_store_wait_read();
      __syncwarp();
    }
    release(Traits::kDifferentiates ? stage_before() : held);
  }

  // Issues the products of a step. The first ones of a tile overwrite the accumulators.
  template <int kTokens>
  __device__ __forceinline__ void issue(Products<kTokens>& products, bool begins) const {
    using Mma = ptx::Wgmma<Element, kTokens>;
    constexpr int kSliceBytes =
        Traits::kTransposed ? 16 * kBoxRowBytes : 32;  // 16 columns of weights
    const uint64_t a =
        ptx::swizzled_descriptor(shared.weights(pipe.stage) + rows_before() * kBoxRowBytes, 16);
    const uint64_t b = ptx::swizzled_descriptor(shared.tokens(pipe.stage), 16);
    ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
    if (Traits::kGathers) ptx::fence_proxy_async_shared();
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kStep / 16; ++slice) {
      const bool add = slice > 0 || !begins;
      const uint64_t first = ptx::advance(a, kSliceBytes * slice);
      const uint64_t second = ptx::advance(first, Traits::kHalfBytes);
      const uint64_t tokens = ptx::advance(b, 32 * slice);
      if constexpr (Traits::kTransposed) {
        Mma::multiply_major(products.first, first, tokens, add);
        Mma::multiply_major(products.second, second, tokens, add);
      } else {
        Mma::multiply(products.first, first, tokens, add);
        Mma::multiply(products.second, second, tokens, add);
      }
    }
    ptx::wgmma_commit();
  }

  // The main loop. Consumers that alternate take turns, which end when all products are issued.
  // Otherwise the second consumer begins a tile a step later than the first, so that one's products
  // overlap the other's stores.
  template <int kTokens>
  __device__ __forceinline__ void multiply(Products<kTokens>& products) {
    const int steps = ceil_div<Traits::kStep>(params.columns);
    const bool lets_lag = !Traits::kAlternates && group == 0;
    // The first consumer must not reach the barrier for the next tile before the second has reached
    // it for this one. In longer tiles it would need a stage that the second still holds; in tiles
    // this short it must wait.
    const bool meets = steps + Traits::steps_behind(kTokens / kUnitTokens) + 1 < Traits::kStages;
    const auto let_lag = [&] {
      if (meets) {
        ptx::named_barrier_sync_apart(kLagBarrier, 2 * kThreadsPerGroup);
      } else {
        ptx::named_barrier_arrive(kLagBarrier, 2 * kThreadsPerGroup);
      }
    };
    // An announcement takes about as long as a step. Consumers announce one after the other, so
    // that one of them multiplies.
    const int announces_at =
        group == 1 && steps > 2 * kAnnounceStep ? 2 * kAnnounceStep : kAnnounceStep;
    if (Traits::kAlternates) {
      ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    } else if (group == 1) {
      ptx::named_barrier_sync_apart(kLagBarrier, 2 * kThreadsPerGroup);
    }
    issue(products, true);
    if (!Traits::kAlternates) give_back();
    int last_stage = pipe.stage;
    pipe.advance();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      // If loads are the bottleneck, a stage is released before the next one has arrived. All warps
      // must agree on it, because they wait for the same products.
      const bool come =
          ptx::named_barrier_all(kStoreBarrier + group, kThreadsPerGroup,
                                 ptx::mbarrier_test(shared.full(pipe.stage), pipe.parity));
      if (!come) {
        ptx::wgmma_wait<0>();
        release(last_stage);
      }
      issue(products, false);
      if (lets_lag && step == 1) let_lag();
      // By now the stores are complete.
      if (Traits::kAnnounces && step == announces_at && held != kNone) announce();
      if (come) {
        ptx::wgmma_wait<1>();
        release(last_stage);
      }
      last_stage = pipe.stage;
      pipe.advance();
    }
    if (Traits::kAlternates) {
      ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kThreadsPerGroup);
    }
    ptx::wgmma_wait<0>();
    if (lets_lag && steps == 1) let_lag();
    ptx::pin(products.first);
    ptx::pin(products.second);
    if (Traits::kAnnounces) {
      held = last_stage;
    } else {
      release(last_stage);
    }
  }

  // Weights that a consumer keeps, as A operands of wgmma: its 64 rows, 16 columns per slice.
  struct Kept {
    static constexpr int kSlices = Traits::kStep / 16;
    uint32_t values[Traits::kKeptSteps * kSlices][4];
  };

  // Loads a run's weights from their stages.
  __device__ __forceinline__ void keep(Kept* kept) {
    const int lane = lane_index();
    const int row = group * kConsumerRows + warp_of_group() * 16 + lane % 16;
    const int chunk = lane / 16;
    PipelineState<Traits::kStages> first = pipe;
#pragma unroll
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
      const uint32_t from = shared.weights(pipe.stage) + row * kBoxRowBytes;
#pragma unroll
      for (int slice = 0; slice < Kept::kSlices; ++slice) {
        ptx::ldmatrix_x4(kept->values[step * Kept::kSlices + slice],
                         from + ((2 * slice + chunk) ^ (row % 8)) * 16);
      }
      pipe.advance();
    }
    // The copy engine, of this block or the other, overwrites what threads have read.
    ptx::fence_proxy_async_shared();
    __syncwarp();
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      release(first.stage);
      first.advance();
    }
  }

  // The main loop with kept weights. Consumers take turns, which end when all products of a tile
  // are issued.
  template <int kTokens>
  __device__ __forceinline__ void multiply_kept(float (&products)[kTokens / 2], const Kept& kept) {
    using Mma = ptx::Wgmma<Element, kTokens>;
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    int last_stage = 0;
#pragma unroll
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      const uint64_t tokens = ptx::swizzled_descriptor(shared.tokens(pipe.stage), 16);
      ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < Kept::kSlices; ++slice) {
        Mma::multiply_by_rows(products, kept.values[step * Kept::kSlices + slice],
                              ptx::advance(tokens, 32 * slice), step + slice > 0);
      }
      ptx::wgmma_commit();
      if (step > 0) {
        ptx::wgmma_wait<1>();
        release(last_stage);
      }
      last_stage = pipe.stage;
      pipe.advance();
    }
    ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kThreadsPerGroup);
    ptx::wgmma_wait<0>();
    ptx::pin(products);
    release(last_stage);
  }
};

}  // namespace flashmoe::moe::sm90
