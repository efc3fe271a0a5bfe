// What the roles of a block share: tiles, the layout of shared memory, and barriers.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/moe/uniform.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

inline constexpr int kNone = -1;
// Named barriers: one per consumer, and one for its turn; or for the second one to begin.
inline constexpr int kStoreBarrier = 1;
inline constexpr int kTurnBarrier = 3;
inline constexpr int kLagBarrier = 3;
inline constexpr int kGatherBarrier = 4;
// Both consumers of `up` have read the last stage's tokens. Kernels whose output another warp sends
// have no such barrier; theirs begin at the same number.
inline constexpr int kTokensBarrier = 5;
// Barriers per output buffer of a consumer whose output another warp sends: filled, and drained.
inline constexpr int kFilledBarrier = 5;
inline constexpr int kDrainedBarrier = 9;
inline constexpr int kFillingThreads = kThreadsPerGroup + kThreadsPerWarp;

// The work of a block, or of one consumer if consumers alternate, in one pass of the main loop. The
// producer decodes it and stores it in shared memory.
struct alignas(16) Tile {
  int expert;
  int first_slot;  // of its tokens; with counts, relative to the batch
  int tokens;      // existing tokens; 0: nothing is stored for this tile
  int units;       // width, in units of kUnitTokens; 0: no more tiles
  int row_tile;
  int shared;  // the other block of the cluster has the same weights
  int reused;  // other tiles have the same weights
  int edge;    // the first tile of a run with kept weights, or the first entry after the last tile
};

static_assert(sizeof(Tile) == kTileInfoBytes);

// The layout of shared memory.
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
  // The stage is loaded: the TMA warp expects bytes, and each gathering thread arrives.
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + Traits::kBarriersOffset + 8 * stage;
  }
  // The stage is free in both blocks of the cluster; the consumer warps of both arrive.
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return full(Traits::kStages + stage);
  }
  // The tile in that slot is known.
  __device__ __forceinline__ uint32_t known(int slot) const {
    return full(2 * Traits::kStages + slot);
  }
  // In the second block of a cluster of `down`: the item for that slot has arrived. item() is its
  // place.
  __device__ __forceinline__ uint32_t dealt(int slot) const {
    return known(Traits::kTileSlots + slot);
  }
  __device__ __forceinline__ uint32_t item(int slot) const {
    return base + Traits::kItemsOffset + 4 * slot;
  }
};

// Stores a tile in the slot of its number. The old tile there is done: there are fewer stages than
// slots.
template <class Traits>
__device__ __forceinline__ void publish(const Shared<Traits>& shared, int number,
                                        const Tile& tile) {
  const int slot = number % Traits::kTileSlots;
  shared.tiles[slot] = tile;
  ptx::mbarrier_arrive(shared.known(slot));
}

}  // namespace flashmoe::moe::sm90
