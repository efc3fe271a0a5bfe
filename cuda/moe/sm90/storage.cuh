// What the roles of a block know of each other: tiles, where they lie in shared memory, and
// barriers.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

inline constexpr int kNone = -1;
// Named barriers: of each consumer its own, and its turn; or the second's to begin.
inline constexpr int kStoreBarrier = 1;
inline constexpr int kTurnBarrier = 3;
inline constexpr int kLagBarrier = 3;
inline constexpr int kGatherBarrier = 4;
// Of each buffer of the output of a consumer whose output another warp sends: it is filled, it is
// drained.
inline constexpr int kFilledBarrier = 5;
inline constexpr int kDrainedBarrier = 9;
inline constexpr int kFillingThreads = kThreadsPerGroup + kThreadsPerWarp;

// What a block, or of one whose consumers alternate one of them, computes in one pass of the main
// loop. The producer works it out and leaves it in shared memory.
struct alignas(16) Tile {
  int expert;
  int first_slot;  // of its tokens; with counts from the start of the batch
  int tokens;      // that there are; 0: nothing comes of this tile
  int units;       // that it is wide, of kUnitTokens; 0: there are no more tiles
  int row_tile;
  int shared;  // weights with the other block of the cluster
  int reused;  // weights by other tiles
  int edge;    // the first of a run, for which weights are kept; or of what follows the last tile
};

static_assert(sizeof(Tile) == kTileInfoBytes);

// Where things are in shared memory.
template <class Traits>
struct Shared {
  uint32_t base;
  Tile* tiles;  // [kTileSlots]

  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const {
    return weights(stage) + Traits::kTokensOffset;
  }
  // The stage is loaded: the TMA warp says of how many bytes, and each gathering thread arrives.
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + Traits::kBarriersOffset + 8 * stage;
  }
  // The stage is free in both blocks of the cluster, whose consumer warps all arrive.
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return full(Traits::kStages + stage);
  }
  // The tile in that place is known.
  __device__ __forceinline__ uint32_t known(int slot) const {
    return full(2 * Traits::kStages + slot);
  }
  // `down`, the second block of a cluster: the item of the tile in that place has come, and where.
  __device__ __forceinline__ uint32_t dealt(int slot) const {
    return known(Traits::kTileSlots + slot);
  }
  __device__ __forceinline__ uint32_t item(int slot) const {
    return base + Traits::kItemsOffset + 4 * slot;
  }
};

// Leaves a tile where consumers look for the one of that number. The one that was there is done
// with: stages are fewer than places.
template <class Traits>
__device__ __forceinline__ void publish(const Shared<Traits>& shared, int number,
                                        const Tile& tile) {
  const int slot = number % Traits::kTileSlots;
  shared.tiles[slot] = tile;
  ptx::mbarrier_arrive(shared.known(slot));
}

}  // namespace flashmoe::moe::sm90
