// The producer: one thread, which takes items and loads their K and V, and for each step Q, dO, lse
// and delta.
#pragma once

#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90_backward/barriers.cuh"
#include "cuda/attention/sm90_backward/counters.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::length_q_of;

template <class Traits>
struct Producer : Counters<Traits::kInPanels> {
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;

  using Item = ItemFor<Traits>;
  static_assert(sizeof(Item) == Traits::kItemBytes);
  // The item is read where it is used: there are too few registers to keep it.
  using SharedItem = volatile Item;

  const ParamsFor<Traits>& params;
  const Barriers<Traits> barriers;
  const uint32_t shared;
  Item* const shared_items;
  DoutRing<Traits> dout_ring;

  __device__ __forceinline__ Producer(const ParamsFor<Traits>& params_,
                                      const Barriers<Traits>& barriers_, uint32_t shared_,
                                      Item* items_)
      : params(params_), barriers(barriers_), shared(shared_), shared_items(items_) {}

  // Loads a tile of queries. Each of the blocks that share an item loads every second box, to both
  // of them.
  template <int kBoxes>
  __device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap& map, uint32_t full,
                                            int first_rank, int tile_q, int head, int batch) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if constexpr (Traits::kCluster > 1) {
        if ((box + first_rank) % Traits::kCluster != block_rank<Traits>()) continue;
        ptx::tma_load_multicast(to + box * Traits::kQueryBoxBytes, &map, full, ptx::kEvictNormal,
                                (1 << Traits::kCluster) - 1, box * kBoxColumns,
                                tile_q * Traits::kTileQ, head, batch);
      } else {
        ptx::tma_load(to + box * Traits::kQueryBoxBytes, &map, full, ptx::kEvictNormal,
                      box * kBoxColumns, tile_q * Traits::kTileQ, head, batch);
      }
    }
  }

  // Does the same for a sequence.
  template <int kBoxes>
  __device__ __forceinline__ void load_rows_of_sequence(uint32_t to, const CUtensorMap& map,
                                                        uint32_t full, const SharedItem& item,
                                                        int tile_q, int head,
                                                        int rows_per_batch) const {
    const RaggedRow at = row_of_sequence(tile_q * Traits::kTileQ, item.batch_q, rows_per_batch,
                                         item.begin_q, item.length_q);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tma_load(to + box * Traits::kQueryBoxBytes, &map, full, ptx::kEvictNormal,
                    box * kBoxColumns, at.row, head, at.base, at.wrap);
    }
  }

  // Returns what the consumers have to do in a step of a sequence. Lengths are in shared memory,
  // and the consumers have no time for them.
  __device__ __forceinline__ uint32_t duties_of(const SharedItem& item, int tile_q) const {
    const int row = tile_q * Traits::kTileQ;
    const int last_row = min(row + Traits::kTileQ, length_q_of(params, item)) - 1;
    const int first_key = item.tile * Traits::kTileK;
    // All queries see the keys from `first_of_all` to before `end_of_all`. Some query sees each key
    // from `first` to before `end`.
    const int first_of_all = attention_backward::first_key_of(params, item, last_row) - first_key;
    const int end_of_all = attention_backward::end_key_of(params, item, row) - first_key;
    const int first = attention_backward::first_key_of(params, item, row) - first_key;
    const int end = attention_backward::end_key_of(params, item, last_row) - first_key;
    uint32_t duties = 0;
#pragma unroll
    for (int group = 0; group < kConsumers; ++group) {
      const int key = group * kKeysPerGroup;
      if (first_of_all > key || end_of_all < key + kKeysPerGroup) duties |= kMaskedDuty << group;
      if (Traits::kTileQ == kKeysPerGroup && (end <= key || first >= key + kKeysPerGroup)) {
        duties |= kUnseenDuty << group;
      }
    }
    return duties;
  }

  __device__ __forceinline__ void load_q(const SharedItem& item, const Steps& steps) {
    const int head = item.head_kv * params.heads_per_kv + steps.head;
    const int tile_q = steps.tile_q;
    const uint32_t stage = index % Traits::kStages;
    wait_for_blocks<Traits>(barriers.q_empty(stage), ~(index / Traits::kStages) & 1);
    if constexpr (Traits::kInPanels) {
      ptx::store_shared(barriers.stage_row(stage), static_cast<uint32_t>(tile_q * Traits::kTileQ));
    }
    if constexpr (Traits::kRagged) {
      ptx::store_shared(barriers.stage_row(stage), duties_of(item, tile_q));
    }
    const uint32_t full = barriers.q_full(stage);
    ptx::mbarrier_arrive_expect(
        full, Traits::kQBytes + (Traits::kDeltaWithQ ? 2 : 1) * Traits::kRowBytes);
    const uint32_t to = shared + Traits::kQOffset + stage * Traits::kQBytes;
    if constexpr (Traits::kRagged) {
      load_rows_of_sequence<Traits::kBoxes>(to, params.q, full, item, tile_q,
                                            head * params.q_repeats.head, params.q_rows_per_batch);
    } else {
      load_rows<Traits::kBoxes>(to, params.q, full, 0, tile_q, head * params.q_repeats.head,
                                item.batch * params.q_repeats.batch);
    }
    ptx::bulk_load(shared + Traits::kLseOffset + stage * Traits::kRowBytes,
                   params.row_lse + rows_of(item, head, tile_q), Traits::kRowBytes, full,
                   ptx::kEvictNormal);
    if constexpr (Traits::kDeltaWithQ) load_delta(item, head, tile_q, stage, full);
  }

  // Loads dO of a step unit by unit. The blocks each load every second box of a unit, to both of
  // them.
  __device__ __forceinline__ void load_dout_by_units(const SharedItem& item, const Steps& steps) {
    constexpr int kBoxesOfUnit = Traits::kBoxesV / Traits::kDoUnits;
    const int head = (item.head_kv * params.heads_per_kv + steps.head) * params.dout_repeats.head;
#pragma unroll
    for (int unit = 0; unit < Traits::kDoUnits; ++unit) {
      const uint32_t stage = dout_ring.stage_of(unit);
      wait_for_blocks<Traits>(barriers.do_empty(stage), dout_ring.parity_of(unit) ^ 1);
      const uint32_t full = barriers.do_full(stage);
      ptx::mbarrier_arrive_expect(full, Traits::kDoUnitBytes);
#pragma unroll
      for (int i = 0; i < kBoxesOfUnit; ++i) {
        const int box = unit * kBoxesOfUnit + i;
        if ((box + 1) % Traits::kCluster != block_rank<Traits>()) continue;
        ptx::tma_load_multicast(
            shared + Traits::kDoOffset + stage * Traits::kDoUnitBytes + i * Traits::kQueryBoxBytes,
            &params.dout, full, ptx::kEvictNormal, (1 << Traits::kCluster) - 1, box * kBoxColumns,
            steps.tile_q * Traits::kTileQ, head, item.batch * params.dout_repeats.batch);
      }
    }
    dout_ring.advance();
  }

  __device__ __forceinline__ void load_dout(const SharedItem& item, const Steps& steps) {
    if constexpr (Traits::kByProducts) return load_dout_by_units(item, steps);
    const int head = item.head_kv * params.heads_per_kv + steps.head;
    const int tile_q = steps.tile_q;
    const uint32_t stage = index % Traits::kDoStages;
    wait_for_blocks<Traits>(barriers.do_empty(stage), ~(index / Traits::kDoStages) & 1);
    const uint32_t full = barriers.do_full(stage);
    ptx::mbarrier_arrive_expect(full,
                                Traits::kDoBytes + (Traits::kDeltaWithQ ? 0 : Traits::kRowBytes));
    const uint32_t to = shared + Traits::kDoOffset + stage * Traits::kDoBytes;
    if constexpr (Traits::kRagged) {
      load_rows_of_sequence<Traits::kBoxesV>(to, params.dout, full, item, tile_q,
                                             head * params.dout_repeats.head,
                                             params.dout_rows_per_batch);
    } else {
      load_rows<Traits::kBoxesV>(to, params.dout, full, 1, tile_q, head * params.dout_repeats.head,
                                 item.batch * params.dout_repeats.batch);
    }
    if constexpr (!Traits::kDeltaWithQ) load_delta(item, head, tile_q, stage, full);
  }

  __device__ __forceinline__ void load_delta(const SharedItem& item, int head, int tile_q,
                                             uint32_t stage, uint32_t full) {
    ptx::bulk_load(shared + Traits::kDeltaOffset + stage * Traits::kRowBytes,
                   params.row_delta + rows_of(item, head, tile_q), Traits::kRowBytes, full,
                   ptx::kEvictNormal);
  }

  __device__ __forceinline__ int64_t rows_of(const SharedItem& item, int head, int tile_q) const {
    if constexpr (Traits::kRagged) {
      return static_cast<int64_t>(attention_backward::tile_of_head(params, item, head) + tile_q) *
             Traits::kTileQ;
    } else {
      return (static_cast<int64_t>(item.batch * params.heads_q + head) * params.tiles_q + tile_q) *
             Traits::kTileQ;
    }
  }

  __device__ __forceinline__ void load_v(const SharedItem& item, bool any) {
    ptx::mbarrier_wait(barriers.v_empty(), ~items & 1);
    if (!any) {
      ptx::mbarrier_arrive(barriers.v_full());
      return;
    }
    ptx::mbarrier_arrive_expect(barriers.v_full(), Traits::kVBytes);
    if constexpr (Traits::kRagged) {
      load_keys_of_sequence<Traits::kBoxesV>(shared + Traits::kVOffset, params.v, barriers.v_full(),
                                             item, item.head_kv * params.v_repeats.head,
                                             params.v_rows_per_batch);
      return;
    } else {
#pragma unroll
      for (int box = 0; box < Traits::kBoxesV; ++box) {
        ptx::tma_load(shared + Traits::kVOffset + box * Traits::kKeyBoxBytes, &params.v,
                      barriers.v_full(), ptx::kEvictNormal, box * kBoxColumns,
                      first_key_of(item, block_rank<Traits>()),
                      item.head_kv * params.v_repeats.head, item.batch * params.v_repeats.batch);
      }
    }
  }
  template <int kBoxes>
  __device__ __forceinline__ void load_keys_of_sequence(uint32_t to, const CUtensorMap& map,
                                                        uint32_t full, const SharedItem& item,
                                                        int head, int rows_per_batch) const {
    const RaggedRow at = row_of_sequence(first_key_of(item, 0), item.batch_k, rows_per_batch,
                                         item.begin_k, item.length_k);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tma_load(to + box * Traits::kKeyBoxBytes, &map, full, ptx::kEvictNormal,
                    box * kBoxColumns, at.row, head, at.base, at.wrap);
    }
  }

  // Loads K. The item itself comes with it.
  __device__ __forceinline__ void load_k(const SharedItem& item, bool any) {
    ptx::mbarrier_wait(barriers.k_empty(), ~items & 1);
    if (!any) {
      ptx::mbarrier_arrive(barriers.k_full());
      return;
    }
    ptx::mbarrier_arrive_expect(barriers.k_full(), Traits::kKBytes + Traits::kOtherKBytes);
    const uint32_t rank = block_rank<Traits>();
    if constexpr (Traits::kRagged) {
      load_keys_of_sequence<Traits::kBoxes>(shared + Traits::kKOffset, params.k, barriers.k_full(),
                                            item, item.head_kv * params.k_repeats.head,
                                            params.k_rows_per_batch);
    } else {
      load_boxes_of_k<Traits::kBoxes>(shared + Traits::kKOffset, item, 0, rank);
    }
    if constexpr (Traits::kCluster > 1) {
      load_boxes_of_k<Traits::kOtherBoxes>(shared + Traits::kOtherKOffset, item,
                                           rank * Traits::kBoxes / 2, rank ^ 1);
    }
  }
  template <int kBoxes>
  __device__ __forceinline__ void load_boxes_of_k(uint32_t to, const SharedItem& item,
                                                  int first_box, uint32_t rank) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tma_load(to + box * Traits::kKeyBoxBytes, &params.k, barriers.k_full(),
                    ptx::kEvictNormal, (first_box + box) * kBoxColumns, first_key_of(item, rank),
                    item.head_kv * params.k_repeats.head, item.batch * params.k_repeats.batch);
    }
  }
  static __device__ __forceinline__ int first_key_of(const SharedItem& item, uint32_t rank) {
    return item.tile * Traits::kTileK + rank * Traits::kBlockKeys;
  }

  __device__ __forceinline__ int take_ticket() const {
    return static_cast<int>(atomicAdd(params.ticket, 1u));
  }

  // Copies an item as attention_backward::copy_item does, but with the ticket in place of the
  // item's gaps, which are the rest of its last chunk. There are too few registers to keep the
  // ticket.
  __device__ __forceinline__ void copy_item(int ticket, SharedItem& to) const {
    static_assert(Traits::kRagged);
    to.gaps[0] = ticket;
    if (ticket >= params.totals->items) {
      to.tile = kNoItem;
      return;
    }
    constexpr int kChunks = sizeof(Item) / sizeof(uint4) - 1;
    const Item& from = params.items[ticket];
    uint4 chunks[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunks[i] = reinterpret_cast<const uint4*>(&from)[i];
    const int course = from.course;
    auto* const place = const_cast<uint4*>(reinterpret_cast<volatile uint4*>(&to));
#pragma unroll
    for (int i = 0; i < kChunks; ++i) place[i] = chunks[i];
    to.course = course;
  }

  // Takes the next item and leaves it in its place. Blocks that share items get them from the first
  // block.
  __device__ __forceinline__ Item take_item(Item* place) {
    if constexpr (Traits::kCluster > 1) {
      if (block_rank<Traits>() != 0) {
        ptx::mbarrier_arrive_expect(barriers.item_full(), Traits::kItemBytes);
        ptx::mbarrier_arrive_cluster(ptx::map_to_rank(barriers.item_wanted(), 0));
        ptx::mbarrier_wait_cluster(barriers.item_full(), items & 1);
        const SharedItem& item = *place;
        return {item.batch, item.head_kv, item.tile,       item.begin,
                item.end,   item.course,  item.split_item, item.split};
      }
      ptx::mbarrier_wait_cluster(barriers.item_wanted(), items & 1);
    }
    if constexpr (Traits::kRagged) {
      copy_item(take_ticket(), *place);
      Item item = {};  // what steps are made of
      item.begin = place->begin;
      item.end = place->tile == kNoItem ? item.begin : place->end;
      item.course = place->course;
      return item;
    } else {
      const Item item = Item::template at<Traits>(params, take_ticket());
      *place = item;
      if constexpr (Traits::kCluster > 1) {
        const uint32_t full = ptx::map_to_rank(barriers.item_full(), 1);
        const uint32_t to = ptx::map_to_rank(
            shared + Traits::kItemOffset + items % kItemsHeld * Traits::kItemBytes, 1);
        ptx::store_async(to, item.batch, full);
        ptx::store_async(to + 4, item.head_kv, full);
        ptx::store_async(to + 8, item.tile, full);
        ptx::store_async(to + 12, item.begin, full);
        ptx::store_async(to + 16, item.end, full);
        ptx::store_async(to + 20, item.course, full);
        ptx::store_async(to + 24, item.split_item, full);
        ptx::store_async(to + 28, item.split, full);
      }
      return item;
    }
  }

  // K is loaded last of what an item begins with, because it is given back last. An item is taken
  // only when it can begin: if it were taken earlier, others would wait for its parts of dQ all the
  // while.
  __device__ __forceinline__ void run() {
    for (;; ++items) {
      Item* const place = shared_items + items % kItemsHeld;
      const Item taken = take_item(place);
      const SharedItem& item = *place;
      Steps steps(taken, params.heads_per_kv);
      const bool any = steps.left > 0;
      if (any) load_q(item, steps);
      load_v(item, any);
      if (any) load_dout(item, steps);
      load_k(item, any);
#pragma unroll 1
      while (steps.left > 1) {
        ++index;
        steps.advance(runs_down(item), params.heads_per_kv);
        load_q(item, steps);
        load_dout(item, steps);
      }
      if (any) ++index;
      if (item.tile == kNoItem) break;
    }
  }
};

}  // namespace flashmoe::sm90_backward
