// The turn keepers of kernels that divide their work by products (by_products.cuh): two warps
// beside the producer, in place of the writers.
#pragma once

#include "cuda/attention/sm90_backward/writer.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"

namespace flashmoe::sm90_backward {

// A turn keeper has every second panel of dQ. It tells the consumer of dQ what to do with the panel
// and when its turn has come, and gives the turn on.
template <class Traits>
struct TurnKeeper : Writer<Traits> {
  using Base = Writer<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::index;
  using Base::items;
  using Base::params;
  using Base::shared_items;
  using Base::slot;
  using typename Base::Part;

  __device__ __forceinline__ void keep(const Part& part) {
    SlotUse use = part.last ? kLastPart : kPart;
    if (part.before == 0) use = part.last ? kOnlyPart : kFirstPart;
    ptx::store_shared(barriers.slot_use(slot), static_cast<uint32_t>(use));
    ptx::store_shared(barriers.slot_tile(slot), part.tile);
    if (part.before > 0) ptx::wait_for_word(params.turns + part.tile, part.before);
    Base::offer();
    Base::wait_for_consumers();
    if (!part.last) ptx::store_release(params.turns + part.tile, part.before + 1);
  }

  __device__ __forceinline__ void run() {
    for (;; ++items) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      const typename Base::SharedItem& item = shared_items[items % kItemsHeld];
      ptx::mbarrier_arrive(barriers.k_empty());
      if (item.tile == kNoItem) break;
      Steps steps(shared_items[items % kItemsHeld], params.heads_per_kv);
#pragma unroll 1
      for (; steps.left > 0; steps.advance(runs_down(item), params.heads_per_kv)) {
#pragma unroll 1
        for (int panel = 0; panel < Traits::kBlockPanels; ++panel) {
          if (index++ % kSlots != slot) continue;
          keep(Base::part_of(item, item.head_kv * params.heads_per_kv + steps.head, steps.tile_q,
                             block_rank<Traits>() * Traits::kBlockPanels + panel));
        }
      }
    }
  }
};

}  // namespace flashmoe::sm90_backward
