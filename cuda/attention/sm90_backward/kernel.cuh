// The kernel of the sm_90 attention backward: barriers, and which warps are what.
#pragma once

#include "cuda/attention/sm90_backward/backward.cuh"
#include "cuda/attention/sm90_backward/by_products.cuh"
#include "cuda/attention/sm90_backward/panels.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"

namespace flashmoe::sm90_backward {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_backward_kernel(const __grid_constant__ ParamsFor<Traits> params) {
  // There is no room to align it by hand.
  extern __shared__ __align__(kSharedAlignment) unsigned char raw[];
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  if (shared % kSharedAlignment != 0) __trap();
  const Barriers<Traits> barriers{shared + Traits::kBarriersOffset};
  auto* items = reinterpret_cast<ItemFor<Traits>*>(raw + Traits::kItemOffset);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    constexpr int kWarps = 4;  // of a consumer
    constexpr int kConsumerWarps = kWarps * kConsumers;
    constexpr int kWarpsOfV = Traits::kByProducts ? kWarps : kConsumerWarps;
    constexpr int kWarpsOfSlot = Traits::kInPanels ? kWarps : kConsumerWarps;
    // Queries go to all blocks of a cluster at once.
    constexpr int kWarpsOfQueries = Traits::kCluster * kConsumerWarps;
    ptx::mbarrier_init(barriers.k_full(), 1);
    ptx::mbarrier_init(barriers.k_empty(), kWarps * Traits::kConsumerGroups + kSlots);
    ptx::mbarrier_init(barriers.v_full(), 1);
    ptx::mbarrier_init(barriers.v_empty(), kWarpsOfV);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(barriers.q_full(stage), 1);
      ptx::mbarrier_init(barriers.q_empty(stage), kWarpsOfQueries);
    }
    for (int stage = 0; stage < Traits::kDoStages; ++stage) {
      ptx::mbarrier_init(barriers.do_full(stage), 1);
      ptx::mbarrier_init(barriers.do_empty(stage), kWarpsOfQueries);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(barriers.slot_ready(slot), 1);
      ptx::mbarrier_init(barriers.slot_full(slot), kWarpsOfSlot);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
      ptx::mbarrier_init(barriers.ds_full(buffer), Traits::kCluster * kWarpsOfV);
      if (Traits::kInPanels) ptx::mbarrier_init(barriers.ds_empty(buffer), kWarpsOfV);
      if (Traits::kByProducts)
        ptx::mbarrier_init(barriers.ds_taken(buffer), Traits::kCluster * kWarps);
    }
    if (Traits::kByProducts) {
      ptx::mbarrier_init(barriers.item_wanted(), 1);
      ptx::mbarrier_init(barriers.item_full(), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (Traits::kCluster > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  ptx::wait_for_dependencies();
  ptx::launch_dependents();

  const int group = __shfl_sync(kFullWarp, thread / kThreadsPerGroup, 0);
  if (group != 0) {
    if constexpr (Traits::kByProducts) {
      consume_by_products<Traits>(params, barriers, shared, items, group);
    } else {
      ptx::take_registers<Traits::kConsumerRegisters>();
      if constexpr (Traits::kInPanels) {
        PanelConsumer<Traits> consumer(params, barriers, shared, items, group - 1);
        take_items(consumer);
      } else {
        Consumer<Traits> consumer(params, barriers, shared, items, group - 1);
        consumer.run();
      }
    }
  } else {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    const int warp = warp_index();
    if (lane_index() != 0) {
      // Other lanes have nothing to do.
    } else if (warp == 0) {
      Producer<Traits>(params, barriers, shared, items).run();
    } else if (warp <= kSlots) {
      const int slot = warp - 1;
      if constexpr (Traits::kByProducts) {
        TurnKeeper<Traits> keeper(params, barriers, 0, items, slot);
        keeper.run();
      } else {
        Writer<Traits> writer(params, barriers,
                              shared + Traits::kSlotOffset + slot * Traits::kSlotBytes, items,
                              slot);
        if constexpr (Traits::kInPanels) {
          writer.run_by_panels();
        } else {
          writer.run();
        }
      }
    }
  }
  // A block's shared memory is there until the other one is done with it.
  if constexpr (Traits::kCluster > 1) {
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

}  // namespace flashmoe::sm90_backward
