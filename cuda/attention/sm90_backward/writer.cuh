// The writers: one thread for each slot in shared memory. A writer moves what the consumers leave
// in its slot to global memory: parts of dQ, which it adds to a sum in a fixed order, and dV and
// dK.
#pragma once

#include <type_traits>

#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90_backward/barriers.cuh"
#include "cuda/attention/sm90_backward/counters.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/proxy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_backward {

// Tells whether a later split of the item writes its dV and dK.
template <class AnyItem>
__device__ __forceinline__ bool leaves_sums(const CommonParams& params, const AnyItem& item) {
  if constexpr (AnyItem::kRagged) {
    return false;
  } else {
    return item.split_item != kWhole && item.split + 1 < params.split.splits;
  }
}
template <class Traits>
struct Writer : Counters<Traits::kInPanels> {
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;
  using Counters<Traits::kInPanels>::slot_uses;
  using Counters<Traits::kInPanels>::holds;

  using Item = ItemFor<Traits>;
  using SharedItem = volatile Item;
  // What is known of an item during a turn. For ragged batches it is read where it is used.
  using HeldItem = std::conditional_t<Traits::kRagged, const SharedItem&, const Item>;

  const ParamsFor<Traits>& params;
  const Barriers<Traits> barriers;
  const uint32_t shared_slot;
  const Item* const shared_items;
  const int slot;

  __device__ __forceinline__ Writer(const ParamsFor<Traits>& params_,
                                    const Barriers<Traits>& barriers_, uint32_t shared_slot_,
                                    const Item* items_, int slot_)
      : params(params_),
        barriers(barriers_),
        shared_slot(shared_slot_),
        shared_items(items_),
        slot(slot_) {}
  // A part of a tile of dQ, or of a panel of a tile.
  struct Part {
    uint32_t tile;    // number among all tiles of dQ, or all panels
    uint32_t before;  // number of parts that come before it
    bool last;
    uint32_t sum;  // number of its sum in the workspace
    __device__ __forceinline__ bool takes_sum() const { return last && before > 0; }
  };
  template <class AnyItem>
  __device__ __forceinline__ Part part_of(const AnyItem& item, int head, int tile_q,
                                          int panel = 0) const {
    const Parts parts = Parts::of<Traits>(params, item, tile_q);
    const int before = parts.before<Traits>(item);
    const int tile = attention_backward::tile_of_head(params, item, head) + tile_q;
    const auto place = static_cast<uint32_t>(tile * Traits::kPanels + panel);
    uint32_t sum = place;
    if constexpr (Traits::kRagged) {
      // Only the tiles that need a sum have one.
      sum -= static_cast<uint32_t>(head * (params.tiles_q - params.sum_tiles));
    }
    return {place, static_cast<uint32_t>(before), before == parts.last - parts.first, sum};
  }
  __device__ __forceinline__ float* sums_of(const Part& part) const {
    return params.dq_sums +
           static_cast<int64_t>(part.sum) * (Traits::kTileQ * Traits::kPanelColumns);
  }

  __device__ __forceinline__ void wait_for_turn(const Part& part) const {
    while (ptx::load_acquire(params.turns + part.tile) != part.before) {
    }
    ptx::fence_proxy_async_global();
  }

  // Tells the consumers that the slot is theirs.
  __device__ __forceinline__ void offer() const { ptx::mbarrier_arrive(barriers.slot_ready(slot)); }
  __device__ __forceinline__ void offer(const Part& part) const {
    ptx::store_shared(barriers.slot_use(slot),
                      static_cast<uint32_t>(!part.last        ? kPart
                                            : part.before > 0 ? kLastPart
                                                              : kOnlyPart));
    ptx::store_shared(barriers.slot_tile(slot), part.tile);
    if (part.takes_sum()) {
      wait_for_turn(part);
      ptx::mbarrier_arrive_expect(barriers.slot_ready(slot), Traits::kDqBytes);
      ptx::bulk_load(shared_slot, sums_of(part), Traits::kDqBytes, barriers.slot_ready(slot),
                     ptx::kEvictFirst);
    } else {
      offer();
    }
  }
  __device__ __forceinline__ void wait_for_consumers() {
    ptx::mbarrier_wait(barriers.slot_full(slot), slot_uses & 1);
    ++slot_uses;
  }

  __device__ __forceinline__ int dk_rows_per_batch() const {
    if constexpr (Traits::kRagged) {
      return params.dk_rows_per_batch;
    } else {
      return 0;
    }
  }
  __device__ __forceinline__ int dv_rows_per_batch() const {
    if constexpr (Traits::kRagged) {
      return params.dv_rows_per_batch;
    } else {
      return 0;
    }
  }

  // Stores rows of 64 columns of what each consumer has of dQ.
  __device__ __forceinline__ void store_dq(const HeldItem& item, int head, int tile_q) const {
#pragma unroll
    for (int group = 0; group < (Traits::kSharesDqBox ? 1 : kConsumers); ++group) {
      constexpr int kBoxesOfGroup = ceil_div(Traits::kDqColumns, kBoxColumns);
      const int row = tile_q * Traits::kTileQ + (Traits::kSplitsColumns ? 0 : 64 * group);
#pragma unroll
      for (int box = 0; box < kBoxesOfGroup; ++box) {
        const int column =
            (Traits::kSplitsColumns ? group * Traits::kDqColumns : 0) + box * kBoxColumns;
        const uint32_t from =
            shared_slot + group * Traits::kDqBytesPerGroup + box * 64 * kBoxRowBytes;
        if constexpr (Traits::kRagged) {
          const RaggedRow at = row_of_sequence(row, item.batch_q, params.dq_rows_per_batch,
                                               item.begin_q, item.length_q);
          ptx::tma_store(&params.dq, from, column, at.row, head, at.base, at.wrap);
        } else {
          ptx::tma_store(&params.dq, from, column, row, head, item.batch);
        }
      }
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
  }

  // Does the same for a panel. The place of the panel follows from the part: if it were kept, it
  // would cost registers.
  __device__ __forceinline__ void store_panel(const SharedItem& item, const Part& part) const {
    const int tile = static_cast<int>(part.tile / Traits::kPanels);
    const int panel = static_cast<int>(part.tile % Traits::kPanels);
    const int head_of_all = tile / params.tiles_q;
    ptx::tma_store(&params.dq, shared_slot, panel * kBoxColumns,
                   (tile - head_of_all * params.tiles_q) * Traits::kTileQ,
                   head_of_all - item.batch * params.heads_q, item.batch);
    ptx::tma_store_commit();
  }

  // Adds a panel to its sum. To wait until it is written and then to give its turn on would take as
  // long as the consumer takes for the next panel. So both are done after the next panel, unless
  // there is time before. The turn that was not given on is kept beside the slot: there are too few
  // registers.
  __device__ __forceinline__ void add_panel(const Part& part) {
    if (part.before > 0) {
      if (ptx::load_acquire(params.turns + part.tile) != part.before) {
        give_turn_on();
        wait_for_turn(part);
      } else {
        ptx::fence_proxy_async_global();
      }
    }
    constexpr int kPatience = 32;  // about a microsecond
    bool full = false;
    for (int i = 0; i < kPatience && !full; ++i) {
      full = ptx::mbarrier_test(barriers.slot_full(slot), slot_uses & 1);
    }
    if (!full) give_turn_on();
    wait_for_consumers();
    if (part.before == 0) {
      ptx::bulk_store(sums_of(part), shared_slot, Traits::kDqBytes, ptx::kEvictLast);
    } else {
      ptx::bulk_add(sums_of(part), shared_slot, Traits::kDqBytes, ptx::kEvictLast);
    }
    ptx::tma_store_commit();
    if (holds) {
      ptx::tma_store_wait_but<1>();
      release_turn();
    }
    holds = 1;
    ptx::store_shared(barriers.held_tile(slot), part.tile);
    ptx::store_shared(barriers.held_before(slot), part.before);
  }
  __device__ __forceinline__ void give_turn_on() {
    if (!holds) return;
    ptx::tma_store_wait();
    release_turn();
    holds = 0;
  }
  __device__ __forceinline__ void release_turn() const {
    ptx::store_release(params.turns + ptx::load_shared_uint(barriers.held_tile(slot)),
                       ptx::load_shared_uint(barriers.held_before(slot)) + 1);
  }

  // Writes the part of a step, whose slot has been offered, and offers the slot for what comes next
  // in it. The slot is the consumers' again when it has been read. The turn goes on when everything
  // has been written.
  template <class OfferNext>
  __device__ __forceinline__ void write_dq(const HeldItem& item, const Part& part, int head,
                                           int tile_q, const OfferNext& offer_next) {
    if (part.last) {
      wait_for_consumers();
      if (params.dq_direct.rows == nullptr) store_dq(item, head, tile_q);
      offer_next(true);
      return;
    }
    if (part.before == 0) {
      wait_for_consumers();
      ptx::bulk_store(sums_of(part), shared_slot, Traits::kDqBytes, ptx::kEvictLast);
    } else {
      // The turn mostly comes while the consumers compute.
      wait_for_turn(part);
      wait_for_consumers();
      ptx::bulk_add(sums_of(part), shared_slot, Traits::kDqBytes, ptx::kEvictLast);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
    const bool offered = offer_next(false);
    ptx::tma_store_wait();
    ptx::store_release(params.turns + part.tile, part.before + 1);
    if (!offered) offer_next(true);
  }

  template <int kColumnBoxes>
  __device__ __forceinline__ void write_keys(const CUtensorMap& map, const Direct& direct,
                                             const HeldItem& item, const SharedItem& shared_item,
                                             int rows_per_batch) {
    wait_for_consumers();
    if (direct.rows != nullptr || leaves_sums(params, shared_item)) return;
#pragma unroll
    for (int group = 0; group < kConsumers; ++group) {
#pragma unroll
      for (int box = 0; box < kColumnBoxes; ++box) {
        const uint32_t from = shared_slot + (group * kColumnBoxes + box) * Traits::kGroupBoxBytes;
        const int row = item.tile * Traits::kTileK + group * kKeysPerGroup;
        if constexpr (Traits::kRagged) {
          const RaggedRow at =
              row_of_sequence(row, item.batch_k, rows_per_batch, item.begin_k, item.length_k);
          ptx::tma_store(&map, from, box * kBoxColumns, at.row, item.head_kv, at.base, at.wrap);
        } else {
          ptx::tma_store(&map, from, box * kBoxColumns, row, item.head_kv, item.batch);
        }
      }
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
  }

  // Writes dV or dK of the 64 keys of this slot's consumer, as many columns at a time as the slot
  // holds.
  template <int kColumnBoxes>
  __device__ __forceinline__ void write_keys_by_boxes(const CUtensorMap& map, const Direct& direct,
                                                      const SharedItem& item, bool last) {
    const int row = item.tile * Traits::kTileK + slot * kKeysPerGroup;
#pragma unroll 1
    for (int first = 0; first < kColumnBoxes; first += Traits::kSlotBoxes) {
      wait_for_consumers();
      if (direct.rows == nullptr) {
        for (int box = first; box < min(first + Traits::kSlotBoxes, kColumnBoxes); ++box) {
          ptx::tma_store(&map, shared_slot + (box - first) * Traits::kGroupBoxBytes,
                         box * kBoxColumns, row, item.head_kv, item.batch);
        }
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
      }
      if (!last || first + Traits::kSlotBoxes < kColumnBoxes) offer();
    }
  }

  // Runs a writer whose slot belongs to one consumer: it writes that consumer's panels of dQ of all
  // steps, then dV and dK.
  __device__ __forceinline__ void run_by_panels() {
    for (;; ++items) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      const SharedItem& item = shared_items[items % kItemsHeld];
      ptx::mbarrier_arrive(barriers.k_empty());
      if (item.tile == kNoItem) break;
      Steps steps(shared_items[items % kItemsHeld], params.heads_per_kv);
      int panel = first_panel(index, slot);
      const auto part_of_panel = [&] {
        return part_of(item, item.head_kv * params.heads_per_kv + steps.head, steps.tile_q, panel);
      };
      Part part = {};
      if (steps.left > 0) {
        part = part_of_panel();
        offer(part);
      } else {
        offer();
      }
      while (steps.left > 0) {
        const Part now = part;
        panel += kConsumers;
        if (panel >= Traits::kPanels) {
          steps.advance(runs_down(item), params.heads_per_kv);
          ++index;
          panel = first_panel(index, slot);
        }
        const bool more = steps.left > 0;
        if (now.last) {
          give_turn_on();
          wait_for_consumers();
          if (params.dq_direct.rows == nullptr) store_panel(item, now);
        } else {
          add_panel(now);
        }
        if (more) part = part_of_panel();
        ptx::tma_store_wait_read();
        if (!more) {
          offer();
        } else {
          if (part.takes_sum()) give_turn_on();
          offer(part);
        }
      }
      give_turn_on();
      write_keys_by_boxes<Traits::kBoxesV>(params.dv, params.dv_direct, item, false);
      write_keys_by_boxes<Traits::kBoxes>(params.dk, params.dk_direct, item, true);
    }
    ptx::tma_store_wait();
  }

  // Runs a writer that alternates with the other one over what leaves: parts of dQ of all steps,
  // then dV and dK.
  __device__ __forceinline__ void run() {
    uint32_t next = 0;  // slot of the item's first step
    for (;; ++items) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      HeldItem item = shared_items[items % kItemsHeld];
      ptx::mbarrier_arrive(barriers.k_empty());
      if (item.tile == kNoItem) break;
      Steps steps(item, params.heads_per_kv);
      const int first_head = item.head_kv * params.heads_per_kv;
      const auto part_of_step = [&] {
        return part_of(item, first_head + steps.head, steps.tile_q);
      };
      const int count = steps.left;
      int step = next ^ slot;
      next = (next + count) & 1;
      if (step != 0) steps.advance(runs_down(item), params.heads_per_kv);
      Part part = {};
      if (step < count) {
        part = part_of_step();
        offer(part);
      } else {
        offer();
      }
      while (step < count) {
        const Part now = part;
        const int head = first_head + steps.head;
        const int tile_q = steps.tile_q;
        step += kSlots;
        steps.advance(runs_down(item), params.heads_per_kv);
        steps.advance(runs_down(item), params.heads_per_kv);
        write_dq(item, now, head, tile_q, [&](bool may_wait) {
          if (step >= count) {
            offer();
            return true;
          }
          part = part_of_step();
          if (part.takes_sum() && !may_wait) return false;
          offer(part);
          return true;
        });
      }
      if (step == count) {
        write_keys<Traits::kBoxesV>(params.dv, params.dv_direct, item,
                                    shared_items[items % kItemsHeld], dv_rows_per_batch());
      } else {
        write_keys<Traits::kBoxes>(params.dk, params.dk_direct, item,
                                   shared_items[items % kItemsHeld], dk_rows_per_batch());
      }
    }
    ptx::tma_store_wait();
  }
};

}  // namespace flashmoe::sm90_backward
