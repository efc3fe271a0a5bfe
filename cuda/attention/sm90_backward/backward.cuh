// Attention backward for Hopper (sm_90a): the kernel, its barriers, and which warps take which
// role. It starts from the products P = exp(S - lse), S = scale Q K^T:
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K
//   dK = scale dS^T Q                                          delta = rowsum(dO * O) - dlse
//
// An item is a tile of 128 keys of one KV head (tile.cuh). A block keeps the item's K and V in
// shared memory and runs over the query tiles of all query heads of the KV head. Each of two
// consumer warpgroups has 64 of the keys. It computes S^T and dP^T with its keys as rows, so P^T
// and dS^T are A operands in registers for dV and dK. dV and dK stay in registers for the whole
// item. dS^T also goes to shared memory, where both consumers take it for their half of dQ.
//
// A step's part of dQ, in fp32, goes to a slot in shared memory. A writer warp waits until the sum
// in global memory has the parts of the key tiles before it, and adds this part by the copy engine.
// The first part is stored. For the last part, the sum is loaded into the slot first; there the
// consumers add their registers, scale, and leave 16-bit rows of dQ. So the order of additions is
// fixed, and no kernels of their own pass over zeros or fp32 sums. dV and dK leave by the same
// slots.
//
// One step of a consumer; [..] runs on the tensor cores meanwhile:
//
//   issue S, dQ of the step before | wait S | P = exp2 [dQ] | wait dQ | store it to a slot |
//   issue dP | hand the slot over | wait dP | by 16 queries: issue dV, make dS, issue dK | wait
//
// With 128 queries, half of the exponentials come after the issue of dP and run under it.
//
// dQ of a step is made in the next step, so a consumer waits for the other's dS when that is mostly
// there. docs/kernels/attention_backward_sm90_barriers.md says what keeps the writers and readers
// of each buffer apart.
//
// The roles and what they share:
//   producer.cuh     items, and the loads of all tensors: one thread
//   writer.cuh       what leaves through the slots: a thread for each slot
//   consumer.cuh     items and steps, over consumer_state.cuh, products.cuh and probabilities.cuh
//   gradients.cuh    how dQ, dV and dK leave a consumer
//   panels.cuh       consumers of head dimensions above 128
//   by_products.cuh  consumers of wider ones, by two blocks; turn_keeper.cuh replaces the writers
//   barriers.cuh     barriers and words in shared memory; counters.cuh counts their uses
#pragma once

#include "cuda/attention/sm90_backward/barriers.cuh"
#include "cuda/attention/sm90_backward/by_products.cuh"
#include "cuda/attention/sm90_backward/consumer.cuh"
#include "cuda/attention/sm90_backward/panels.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/producer.cuh"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/attention/sm90_backward/turn_keeper.cuh"
#include "cuda/attention/sm90_backward/writer.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/tile/thread.cuh"

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
    constexpr int kWarps = 4;  // warps of a consumer
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

  // A block's shared memory has to exist until the other block is done with it.
  if constexpr (Traits::kCluster > 1) {
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

}  // namespace flashmoe::sm90_backward
