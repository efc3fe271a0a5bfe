// What a block keeps in shared memory beside the tiles of Q, K and V: its barriers, its ring of
// tiles, and the rows of Q that nothing loads.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.cuh"
#include "cuda/attention/sm90/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90 {

// Named barriers: the first of each range, which has one barrier for each consumer.
inline constexpr int kOrderBarrier = 1;
inline constexpr int kStoreBarrier = 5;

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

// The addresses of the mbarriers.
template <class Traits>
struct Barriers {
  uint32_t base;

  __device__ __forceinline__ uint32_t k_full(int stage) const { return of(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return of(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return of(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return of(3, stage); }
  __device__ __forceinline__ uint32_t q_full(int stage, int portion) const {
    return of(4, 0) + 8 * (stage * Traits::kQPortions + portion);
  }
  __device__ __forceinline__ uint32_t q_empty(int stage, int portion) const {
    return q_full(Traits::kQStages + stage, portion);
  }

  // Ragged kernels alone have these two. They guard the slots of the ring of tiles.
  __device__ __forceinline__ uint32_t tile_full(int slot) const {
    return q_full(2 * Traits::kQStages, 0) + 8 * slot;
  }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const {
    return tile_full(Traits::kTileSlots + slot);
  }

 private:
  __device__ __forceinline__ uint32_t of(int kind, int stage) const {
    return base + 8 * (kind * Traits::kStages + stage);
  }
};

// Returns the tile as a group sees it, given the copy of group 0. The copies differ only in their
// rows and heads.
template <class Traits, class Tile>
__device__ __forceinline__ Tile& tile_of_group(Tile& tile, int group) {
  return Traits::kPacksHeads ? (&tile)[group * Traits::kTileSlots] : tile;
}

// Writes zeros to the rows of Q that do not exist and that nothing loads. With anything else there,
// their scores might be computed again and again.
template <class Traits>
__device__ __forceinline__ void clear_missing_rows(const ParamsOf<Traits>& params,
                                                   unsigned char* memory) {
  constexpr int kChunksOfRow = kBoxRowBytes / 16;
  const int first = params.queries_per_group * params.packed_heads;
  const int chunks = (kRowsPerGroup - first) * kChunksOfRow;
  if (chunks == 0) return;
#pragma unroll 1
  for (int box = 0; box < Traits::kQStages * Traits::kQBytes / Traits::kRowBoxBytes; ++box) {
    auto* rows = reinterpret_cast<uint4*>(memory + Traits::kQOffset + box * Traits::kRowBoxBytes +
                                          first * kBoxRowBytes);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += Traits::kThreads) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_proxy_async_shared();
}

}  // namespace flashmoe::sm90
