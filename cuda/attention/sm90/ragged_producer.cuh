// The producer of sequences: ragged, padded and paged batches. One thread loads Q and K and another
// loads V, because a single thread would have too few registers for what these loads need to know.
// A third warp finds the block's tiles and passes them on in a ring in shared memory.
#pragma once

#include "cuda/attention/sm90/ragged.cuh"
#include "cuda/attention/sm90/ragged_loads.cuh"
#include "cuda/attention/sm90/storage.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90 {

// The ring of tiles that the scheduling warp fills, as one of the threads that load sees it.
template <class Traits>
class RingOfTiles {
 public:
  __device__ __forceinline__ RingOfTiles(RaggedTile* tiles, const Barriers<Traits>& barriers)
      : tiles_(tiles), barriers_(barriers) {}

  // Returns the next tile. The last one has kNoTile as its first row.
  __device__ __forceinline__ RaggedTile& next() {
    slot_ = number_ % Traits::kTileSlots;
    ptx::mbarrier_wait(barriers_.tile_full(slot_), number_ / Traits::kTileSlots % 2);
    ++number_;
    return tiles_[slot_];
  }

  // Gives back the slot that the tile `tiles_ahead` after the last one will take. The tile that the
  // slot holds now lies at least kTilesInFlight before the last one and is no longer needed.
  __device__ __forceinline__ void empty_one(int tiles_ahead) const {
    static_assert(kTilesInFlight + kTilesAhead == Traits::kTileSlots);
    const auto ahead = static_cast<uint32_t>(tiles_ahead);  // at most kTilesAhead
    ptx::mbarrier_arrive(barriers_.tile_empty((slot_ + ahead) % Traits::kTileSlots));
  }

 private:
  RaggedTile* tiles_;
  const Barriers<Traits>& barriers_;
  uint32_t number_ = 0;
  uint32_t slot_ = 0;
};

template <class Traits>
__device__ __forceinline__ void produce_q_and_k(const RaggedParams& params, uint32_t shared,
                                                RaggedTile* tiles,
                                                const Barriers<Traits>& barriers) {
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kQStages> q_pipe;
  const auto load_k = [&](RaggedTile& tile, int key) {
    const uint32_t to = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
    const uint32_t full = barriers.k_full(k_pipe.stage);
    const uint32_t empty = barriers.k_empty(k_pipe.stage);
    if (params.sequences.paged != 0) {
      load_paged_step<Traits, Traits::kBoxes>(params, params.k_pages, params.k_repeats, tile, key,
                                              to, full, empty, k_pipe.parity ^ 1);
    } else {
      load_ragged_step<Traits, Traits::kBoxes>(params.k, params.k_repeats, params.rows_per_batch.k,
                                               tile, key, to, full, empty, k_pipe.parity ^ 1);
    }
    k_pipe.advance();
  };
  const auto wait_for_room = [&](int portion) {
    ptx::mbarrier_wait(barriers.q_empty(q_pipe.stage, portion), q_pipe.parity ^ 1);
  };
  RingOfTiles<Traits> ring(tiles, barriers);
  for (;;) {
    RaggedTile& tile = ring.next();
    if (tile.first_row == kNoTile) break;
    int key = tile.end_key - Traits::kStepKeys;
    // A single Q waits longer than K.
    if (Traits::kQStages == 1 && tile.end_key > 0) {
      load_k(tile, key);
      key -= Traits::kStepKeys;
    }
#pragma unroll
    for (int portion = 0; portion < Traits::kQPortions; ++portion) {
      load_ragged_q<Traits>(
          params, tile, portion, shared + Traits::kQOffset + q_pipe.stage * Traits::kQBytes,
          barriers.q_full(q_pipe.stage, portion), [&] { wait_for_room(portion); });
      // The consumers are done with the tile that came kTilesInFlight before this one.
      if (portion == 0 && key - tile.first_key <= params.keys_before_claim) {
        ring.empty_one(params.tiles_ahead);
      }
    }
    q_pipe.advance();
    for (; key >= tile.first_key; key -= Traits::kStepKeys) {
      load_k(tile, key);
      // Beside decoding, the slot is given back no sooner than it has to be: a block that is free
      // earlier takes the next tile.
      if (key - tile.first_key == params.keys_before_claim + Traits::kStepKeys) {
        ring.empty_one(params.tiles_ahead);
      }
    }
  }
#pragma unroll
  for (int portion = 0; portion < Traits::kQPortions; ++portion) {
    wait_for_room(portion);
    ptx::mbarrier_arrive(barriers.q_full(q_pipe.stage, portion));
  }
}

template <class Traits>
__device__ __forceinline__ void produce_v(const RaggedParams& params, uint32_t shared,
                                          RaggedTile* tiles, const Barriers<Traits>& barriers) {
  PipelineState<Traits::kStages> v_pipe;
  RingOfTiles<Traits> ring(tiles, barriers);
  for (;;) {
    RaggedTile& tile = ring.next();
    if (tile.first_row == kNoTile) break;
    ring.empty_one(params.tiles_ahead);
    for (int key = tile.end_key - Traits::kStepKeys; key >= tile.first_key;
         key -= Traits::kStepKeys) {
      const uint32_t to = shared + Traits::kVOffset + v_pipe.stage * Traits::kVBytes;
      const uint32_t full = barriers.v_full(v_pipe.stage);
      const uint32_t empty = barriers.v_empty(v_pipe.stage);
      if (params.sequences.paged != 0) {
        load_paged_step<Traits, Traits::kBoxesV>(params, params.v_pages, params.v_repeats, tile,
                                                 key, to, full, empty, v_pipe.parity ^ 1);
      } else {
        load_ragged_step<Traits, Traits::kBoxesV>(params.v, params.v_repeats,
                                                  params.rows_per_batch.v, tile, key, to, full,
                                                  empty, v_pipe.parity ^ 1);
      }
      v_pipe.advance();
    }
  }
}

// Finds this block's tiles of a batch of sequences. A whole warp calls it. The first tiles find
// their slots empty. Each tile whose loads begin, or are nearly done, empties the slot of the tile
// `tiles_ahead` after it.
template <class Traits, Tiles kTiles>
__device__ __forceinline__ void schedule(const RaggedParams& params, RaggedTile* tiles,
                                         ChunkSequence* chunk, const Barriers<Traits>& barriers) {
  RaggedScheduler<Traits, kTiles> scheduler(params, chunk);
  const auto ahead = static_cast<uint32_t>(params.tiles_ahead);
  uint32_t number = 0;
  for (bool more = true; more; ++number) {
    const uint32_t slot = number % Traits::kTileSlots;
    const uint32_t emptied = (number + Traits::kTileSlots - ahead) / Traits::kTileSlots;
    ptx::mbarrier_wait(barriers.tile_empty(slot), (emptied & 1) ^ 1);
    more = scheduler.next();
    if (const int group = lane_index(); group < Traits::kTileRings) {
      RaggedTile& tile = tile_of_group<Traits>(tiles[slot], group);
      if (more) {
        scheduler.describe(&tile, group);
      } else {
        tile.first_row = kNoTile;
      }
    }
    __syncwarp();
    // The slot is found again from `number`: there is no register to keep it meanwhile.
    pin(number);
    if (lane_index() == 0) ptx::mbarrier_arrive(barriers.tile_full(number % Traits::kTileSlots));
  }
}

// Gives each warp of the producer's warpgroup its part.
template <class Traits>
__device__ __forceinline__ void produce_ragged(const RaggedParams& params, uint32_t shared,
                                               RaggedTile* tiles, ChunkSequence* chunk,
                                               const Barriers<Traits>& barriers) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) produce_q_and_k<Traits>(params, shared, tiles, barriers);
  if (thread / kThreadsPerWarp == 1) {
    if (params.division == nullptr) {
      schedule<Traits, Tiles::kDealt>(params, tiles, chunk, barriers);
    } else {
      schedule<Traits, Tiles::kTaken>(params, tiles, chunk, barriers);
    }
  }
  if (thread == 2 * kThreadsPerWarp) produce_v<Traits>(params, shared, tiles, barriers);
  // Beside decoding, no other warp waits for the kernel before. This warp keeps this kernel from
  // ending before that one, and from letting the next one begin.
  if (thread / kThreadsPerWarp == 3 && params.division != nullptr) {
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }
}

}  // namespace flashmoe::sm90
