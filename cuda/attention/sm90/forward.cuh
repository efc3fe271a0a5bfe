// Attention forward on sm_90: the kernel, which is warp-specialised and persistent.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// A block has one producer warpgroup, and two or three consumer warpgroups of 64 query rows each.
// Blocks walk tiles of one head, kTileQ rows at a time, and keys from the last to the first, so
// that all masks are in the first steps. In a step, a consumer issues Q K^T of this step and P V of
// the one before, and does the softmax of this step while P V runs. The consumers take turns in
// issuing, so that one's softmax also runs under the other's products.
//
// With split KV (Traits::kSplit), for few query rows and many keys, tiles hold the rows of all
// query heads of a KV head. The steps of all tiles, laid end to end, are dealt to the blocks in
// equal ranges (stream-K). A block writes out a tile that lies within its range; split_kv.cuh has
// the others.
//
// The roles and what they share:
//   producer.cuh         loads of dense batches, and of kernels whose keys are split: one thread
//   ragged_producer.cuh  loads and scheduling of sequences, over ragged_loads.cuh
//   consumer.cuh         tiles and steps, over consumer_state.cuh, products.cuh and statistics.cuh
//   window.cuh           consumers of short windows
//   epilogue.cuh         what consumers write; repair.cuh and fallback.cuh compute rows again
//   storage.cuh          barriers and other shared memory
#pragma once
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/producer.cuh"
#include "cuda/attention/sm90/ragged_producer.cuh"
#include "cuda/attention/sm90/storage.cuh"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/thread.cuh"

// The consumers are included after the producers. The order in which functions are defined changes
// the code that the compiler makes.
#include "cuda/attention/sm90/consumer.cuh"
#include "cuda/attention/sm90/window.cuh"

namespace flashmoe::sm90 {

// Tells whether decoding runs meanwhile. That began when what both need was there (division.h).
template <class Traits>
__device__ __forceinline__ bool runs_beside(const ParamsOf<Traits>& params) {
  if constexpr (Traits::kRagged) {
    return params.division != nullptr;
  } else {
    return false;
  }
}

template <class Traits>
using ConsumerOf =
    std::conditional_t<(Traits::kWindowSteps > 0), WindowConsumer<Traits>, Consumer<Traits>>;

// Runs the roles of a block.
template <class Traits>
__device__ __forceinline__ void compute_tiles(const ParamsOf<Traits>& params) {
  extern __shared__ unsigned char raw[];
  const auto shared_of_block = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const uint32_t shared =
      (shared_of_block + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  const Barriers<Traits> barriers{shared + Traits::kBarriersOffset};
  auto* tiles =
      reinterpret_cast<TileOf<Traits>*>(raw + (shared - shared_of_block) + Traits::kTilesOffset);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      for (int portion = 0; portion < Traits::kQPortions; ++portion) {
        ptx::mbarrier_init(barriers.q_full(stage, portion), 1);
        ptx::mbarrier_init(barriers.q_empty(stage, portion), 4 * Traits::kGroupsPerPortion);
      }
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(barriers.k_full(stage), 1);
      ptx::mbarrier_init(barriers.k_empty(stage), kConsumerWarps);
      ptx::mbarrier_init(barriers.v_full(stage), 1);
      ptx::mbarrier_init(barriers.v_empty(stage), kConsumerWarps);
    }
    if constexpr (Traits::kRagged) {
      for (int slot = 0; slot < Traits::kTileSlots; ++slot) {
        ptx::mbarrier_init(barriers.tile_full(slot), 1);
        ptx::mbarrier_init(barriers.tile_empty(slot), 2);  // both threads that load
      }
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (Traits::kPacked)
    clear_missing_rows<Traits>(params, raw + (shared - shared_of_block));
  __syncthreads();
  // No tensor has been touched so far. The next kernel's blocks may start as soon as this kernel's
  // blocks leave them room.
  if (!runs_beside<Traits>(params)) {
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }

  const int group = __shfl_sync(kFullWarp, thread / kThreadsPerGroup, 0);
  // If the thread is asked, ptxas puts the producer's code first. Nothing starts without the
  // producer's loads, and after other kernels its code has to come from memory. With split keys the
  // producer would then spill.
  const bool consumes = Traits::kSplit ? group != 0 : thread >= kThreadsPerGroup;
  if (consumes) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    const TileOf<Traits>* const own = &tile_of_group<Traits>(*tiles, group - 1);
    ConsumerOf<Traits> consumer(params, barriers, shared, own, group - 1);
    // Consumer 0 has the first turn.
    if (group == Traits::kConsumers) consumer.pass_turn();
    consumer.run();
  } else {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    if constexpr (Traits::kRagged) {
      auto* chunk = reinterpret_cast<ChunkSequence*>(raw + (shared - shared_of_block) +
                                                     Traits::kSequencesOffset);
      produce_ragged<Traits>(params, shared, tiles, chunk, barriers);
    } else {
      if (thread == 0) produce<Traits>(params, shared, tiles, barriers);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ ParamsOf<Traits> params) {
  compute_tiles<Traits>(params);
}

}  // namespace flashmoe::sm90
