// The barriers of the sm_90 attention backward: their addresses and those of the words beside them,
// and how a warp arrives or waits. docs/kernels/attention_backward_sm90_barriers.md says what each
// barrier guards.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90_backward {

using reread::lane_id;
using reread::lane_index;
using reread::thread_index;
using reread::warp_index;
using reread::warp_of_group;

// Named barriers.
inline constexpr int kDsBarrier = 1;     // both consumers
inline constexpr int kGroupBarrier = 2;  // one for each consumer

// The use of a slot.
enum SlotUse : uint32_t {
  kPart,      // a part of dQ that other parts follow
  kLastPart,  // the last part: the slot holds the sum of the parts before it
  kOnlyPart,
  kFirstPart,  // by products: there is no sum yet
};

// What the first consumer has to do in a step of a sequence. The second consumer's bit is the next
// one.
inline constexpr uint32_t kMaskedDuty = 1;  // some query does not see all of the consumer's keys
inline constexpr uint32_t kUnseenDuty = 4;  // no query sees any of them

template <class Traits>
struct Barriers {
  static constexpr int kSlotBarriers = 4 + 2 * Traits::kStages + 2 * Traits::kDoStages;
  uint32_t base;
  __device__ __forceinline__ uint32_t at(int index) const { return base + 8 * index; }
  __device__ __forceinline__ uint32_t k_full() const { return at(0); }
  __device__ __forceinline__ uint32_t k_empty() const { return at(1); }
  __device__ __forceinline__ uint32_t v_full() const { return at(2); }
  __device__ __forceinline__ uint32_t v_empty() const { return at(3); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return at(4 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return at(4 + Traits::kStages + stage);
  }
  __device__ __forceinline__ uint32_t do_full(int stage) const {
    return at(4 + 2 * Traits::kStages + stage);
  }
  __device__ __forceinline__ uint32_t do_empty(int stage) const {
    return at(4 + 2 * Traits::kStages + Traits::kDoStages + stage);
  }
  __device__ __forceinline__ uint32_t slot_ready(int slot) const {
    return at(kSlotBarriers + slot);
  }
  __device__ __forceinline__ uint32_t slot_full(int slot) const {
    return at(kSlotBarriers + kSlots + slot);
  }

  // All of dS is in its buffer.
  __device__ __forceinline__ uint32_t ds_full(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + buffer);
  }

  // With Share::kKeysAndPanels: dQ has been made of the buffer's dS.
  __device__ __forceinline__ uint32_t ds_empty(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + 2 + buffer);
  }

  // With Share::kProducts: P is in the buffer that will hold dS.
  __device__ __forceinline__ uint32_t p_full(int buffer) const { return ds_empty(buffer); }
  // Both blocks have made their dQ of this buffer's dS. Each block has a copy of it.
  __device__ __forceinline__ uint32_t ds_taken(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + 4 + buffer);
  }

  // `item_wanted` is a barrier of the first block: the second block has a place for an item.
  // `item_full` is a barrier of the second block: the item is there.
  __device__ __forceinline__ uint32_t item_wanted() const {
    return at(kSlotBarriers + 2 * kSlots + 6);
  }
  __device__ __forceinline__ uint32_t item_full() const {
    return at(kSlotBarriers + 2 * kSlots + 7);
  }

  // Words follow the barriers. Those of a slot are its use and the tile of dQ, or the panel of a
  // tile, that it holds a part of.
  __device__ __forceinline__ uint32_t slot_use(int slot) const {
    return at(Traits::kBarriers) + Traits::kSlotWordBytes * slot;
  }
  __device__ __forceinline__ uint32_t slot_tile(int slot) const { return slot_use(slot) + 4; }
  // With panels, a slot also has words for the turn that is still to be given on, and a stage has
  // one for its first query. With sequences, the word of a stage says what each consumer has to do
  // in its step.
  __device__ __forceinline__ uint32_t held_tile(int slot) const { return slot_use(slot) + 8; }
  __device__ __forceinline__ uint32_t held_before(int slot) const { return slot_use(slot) + 12; }
  __device__ __forceinline__ uint32_t stage_row(int stage) const {
    return slot_use(kSlots) + kStageWordBytes * stage;
  }
};

__device__ __forceinline__ void release(uint32_t barrier) {
  __syncwarp();
  if (lane_index() == 0) ptx::mbarrier_arrive(barrier);
}

// Returns the number of this block among those that share an item.
template <class Traits>
__device__ __forceinline__ uint32_t block_rank() {
  return Traits::kCluster > 1 ? ptx::cluster_rank() : 0;
}

// Waits for a barrier at which other blocks that share the item arrive.
template <class Traits>
__device__ __forceinline__ void wait_for_blocks(uint32_t barrier, uint32_t parity) {
  if constexpr (Traits::kCluster > 1) {
    ptx::mbarrier_wait_cluster(barrier, parity);
  } else {
    ptx::mbarrier_wait(barrier, parity);
  }
}

}  // namespace flashmoe::sm90_backward
