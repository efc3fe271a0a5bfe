// A consumer warpgroup, which processes the tiles that the producer sends.
#pragma once

#include <type_traits>

#include "cuda/moe/sm90/epilogue.cuh"
#include "cuda/moe/sm90/gradient_epilogue.cuh"
#include "cuda/moe/sm90/mainloop.cuh"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::moe::sm90 {

// A consumer warpgroup. A main loop and its epilogue are compiled for every width of a tile. With a
// common epilogue, ptxas would have to bring the accumulators of all main loops to the same
// registers, and it serialises products instead (C7511).
template <class Traits>
struct Consumer
    : std::conditional_t<Traits::kDifferentiates, GradientEpilogue<Traits>, Epilogue<Traits>> {
  using Base =
      std::conditional_t<Traits::kDifferentiates, GradientEpilogue<Traits>, Epilogue<Traits>>;
  using Base::announce;
  using Base::Base;
  using Base::finish;
  using Base::group;
  using Base::held;
  using Base::keep;
  using Base::multiply;
  using Base::params;
  using Base::pipe;
  using Base::rows_before;
  using Base::sent;
  using Base::shared;
  using Base::tile_number;
  using Base::wait_sent;
  using typename Base::Kept;

  template <int kUnits>
  __device__ __forceinline__ void compute(const Tile& tile) {
    Products<kUnits * kUnitTokens> products;
    multiply(products);
    finish(tile, products);
  }

  // The same with kept weights.
  template <int kUnits>
  __device__ __forceinline__ void compute_kept(int units, const Tile& tile, const Kept& kept) {
    if constexpr (kUnits < Traits::kTileUnits) {
      if (units > kUnits) {
        compute_kept<kUnits + Traits::kUnitSteps>(units, tile, kept);
        return;
      }
    }
    constexpr int kTokens = kUnits * kUnitTokens;
    float products[kTokens / 2];
    this->template multiply_kept<kTokens>(products, kept);
    this->template finish_half<kIdentity, kTokens>(
        tile, products, uniform(tile.row_tile) * Traits::kOutRows + rows_before(), &sent);
  }

  // `run` with kept weights: both consumers process every tile, each its own 64 rows.
  __device__ __forceinline__ void run_kept() {
    Kept kept;
    if (group == 1) ptx::named_barrier_arrive(kTurnBarrier, 2 * kThreadsPerGroup);
    for (int number = 0;; ++number) {
      const int slot = number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), number / Traits::kTileSlots % 2);
      const int units = uniform(shared.tiles[slot].units);
      if (units == 0) break;
      pipe.stage = uniform(pipe.stage);
      if (uniform(shared.tiles[slot].edge) != 0) keep(&kept);
      compute_kept<Traits::kUnitSteps>(units, shared.tiles[slot], kept);
    }
    // Nobody else takes the turn that the last tile's products left.
    if (group == 0) ptx::named_barrier_sync(kTurnBarrier, 2 * kThreadsPerGroup);
    wait_sent();
  }

  // Computes a tile of `units` units by the narrowest code that is wide enough.
  template <int kUnits>
  __device__ __forceinline__ void compute_within(int units, const Tile& tile) {
    if constexpr (kUnits < Traits::kTileUnits) {
      if (units > kUnits) {
        compute_within<kUnits + Traits::kUnitSteps>(units, tile);
        return;
      }
    }
    compute<kUnits>(tile);
  }

  __device__ __forceinline__ void run() {
    const int steps = ceil_div<Traits::kStep>(params.columns);
    const int stride = Traits::kAlternates ? kConsumers : 1;
    tile_number = Traits::kAlternates ? group : 0;
    if (Traits::kAlternates && group == 1) {
      pipe.advance(steps);
      ptx::named_barrier_arrive(kTurnBarrier, 2 * kThreadsPerGroup);
    }
    for (;; tile_number += stride) {
      const int slot = tile_number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), tile_number / Traits::kTileSlots % 2);
      const int units = uniform(shared.tiles[slot].units);
      if (units == 0) break;
      pipe.stage = uniform(pipe.stage);
      if (Traits::kAnnounces && steps <= kAnnounceStep && held != kNone) announce();
      compute_within<Traits::kUnitSteps>(units, shared.tiles[slot]);
      if (Traits::kAlternates) pipe.advance(steps);
    }
    // Nobody else takes the turn that the last tile's products left.
    if (Traits::kAlternates && shared.tiles[tile_number % Traits::kTileSlots].edge != 0) {
      ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    }
    if (Traits::kAnnounces && held != kNone) {
      announce();
    } else if ((Traits::kDifferentiates || warp_of_group() == 0) && lane_index() == 0) {
      ptx::tma_store_wait();
    }
    __syncwarp();
  }
};

}  // namespace flashmoe::moe::sm90
