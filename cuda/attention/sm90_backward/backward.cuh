// Attention backward for Hopper (sm_90a), from the products P = exp(S - lse), S = scale Q K^T:
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K
//   dK = scale dS^T Q                                          delta = rowsum(dO * O) - dlse
//
// An item is a tile of 128 keys of one KV head (tile.cuh); a block keeps its K and V in shared
// memory and runs over the query tiles of all query heads of the KV head. Each of two consumer
// warpgroups has 64 of the keys: it computes S^T and dP^T with its keys as rows, so that P^T and
// dS^T are A operands in registers for dV and dK, which stay in registers for the whole item. dS^T
// also goes to shared memory, where both consumers take it for their half of dQ.
//
// A step's part of dQ, in fp32, goes to a slot in shared memory. A writer warp waits until the
// parts of the key tiles before it are in the sum in global memory, and adds this one by the copy
// engine; the first one is stored. The last part takes the sum into the slot first, where the
// consumers add their registers, scale, and leave 16-bit rows of dQ. So the order of additions is
// fixed, and neither zeros nor fp32 sums are passed over by kernels of their own. dV and dK leave
// by the same slots.
//
// One step of a consumer; [..] runs on the tensor cores meanwhile:
//
//   issue S, dQ of the step before | wait S | P = exp2 [dQ] | wait dQ | store it to a slot |
//   issue dP | hand the slot over | wait dP | by 16 queries: issue dV, make dS, issue dK | wait
//
// With 128 queries half of the exponentials come behind the issue of dP, and run under that.
//
// Head dimensions above 128 have consumers of their own (panels.cuh, by_products.cuh).
// dQ of a step comes in the next one, so a consumer waits for the other's dS when that is mostly
// there. What keeps the writers and readers of each buffer apart is in
// docs/kernels/attention_backward_sm90_barriers.md.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/proxy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::batch_k_of;
using attention_backward::begin_k_of;
using attention_backward::CommonParams;
using attention_backward::length_k_of;
using attention_backward::length_q_of;
using attention_backward::runs_down;
using reread::lane_id;
using reread::lane_index;
using reread::thread_index;
using reread::warp_index;
using reread::warp_of_group;

// Named barriers.
inline constexpr int kDsBarrier = 1;     // both consumers
inline constexpr int kGroupBarrier = 2;  // one for each consumer

// What a slot is for.
enum SlotUse : uint32_t {
  kPart,      // a part of dQ that others follow
  kLastPart,  // the slot holds the sum of the parts before it
  kOnlyPart,
  kFirstPart,  // by products: no sum is there yet
};

// What the first consumer has to do in a step of a sequence; the second one's bit is the next.
inline constexpr uint32_t kMaskedDuty = 1;  // some query does not see all of its keys
inline constexpr uint32_t kUnseenDuty = 4;  // none sees one of its keys

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
  // dS is in its buffer, all of it.
  __device__ __forceinline__ uint32_t ds_full(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + buffer);
  }
  // With Share::kKeysAndPanels: dQ was made of it.
  __device__ __forceinline__ uint32_t ds_empty(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + 2 + buffer);
  }
  // With Share::kProducts: P is in the buffer that dS will be in.
  __device__ __forceinline__ uint32_t p_full(int buffer) const { return ds_empty(buffer); }
  // Both blocks made their dQ of the dS of this buffer, which each has a copy of.
  __device__ __forceinline__ uint32_t ds_taken(int buffer) const {
    return at(kSlotBarriers + 2 * kSlots + 4 + buffer);
  }
  // Of the first block: the second one has a place for an item. Of the second one: it is there.
  __device__ __forceinline__ uint32_t item_wanted() const {
    return at(kSlotBarriers + 2 * kSlots + 6);
  }
  __device__ __forceinline__ uint32_t item_full() const {
    return at(kSlotBarriers + 2 * kSlots + 7);
  }
  // Words behind the barriers: the use of a slot, and the tile of dQ that it holds a part of, or
  // the panel of a tile.
  __device__ __forceinline__ uint32_t slot_use(int slot) const {
    return at(Traits::kBarriers) + Traits::kSlotWordBytes * slot;
  }
  __device__ __forceinline__ uint32_t slot_tile(int slot) const { return slot_use(slot) + 4; }
  // With panels: whose turn is still to be given on, and the first query of a stage. Of sequences:
  // what each consumer has to do in the step of a stage.
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

// The number of this block among those that share an item.
template <class Traits>
__device__ __forceinline__ uint32_t block_rank() {
  return Traits::kCluster > 1 ? ptx::cluster_rank() : 0;
}

// Waits for what other blocks that share the item take part in.
template <class Traits>
__device__ __forceinline__ void wait_for_blocks(uint32_t barrier, uint32_t parity) {
  if constexpr (Traits::kCluster > 1) {
    ptx::mbarrier_wait_cluster(barrier, parity);
  } else {
    ptx::mbarrier_wait(barrier, parity);
  }
}

// Counters of a role, from which stages, slots and parities follow. Only their lowest bits matter:
// where registers are few, one holds all.
template <bool kPacked>
struct Counters {
  uint32_t index = 0;  // of the step
  uint32_t items = 0;
  uint32_t slot_uses = 0;
  uint32_t holds = 0;
};
template <>
struct Counters<true> {
  uint32_t index : 8;
  uint32_t items : 8;
  uint32_t slot_uses : 8;
  uint32_t holds : 1;  // something is put off to the next step
  __device__ __forceinline__ Counters() : index(0), items(0), slot_uses(0), holds(0) {}
};

// By products: in which stage the first unit of dO of a step comes. They go round in a ring whose
// length the units of a step need not divide.
template <class Traits>
struct DoutRing {
  uint32_t stage : 8;
  uint32_t parity : 8;
  __device__ __forceinline__ DoutRing() : stage(0), parity(0) {}
  __device__ __forceinline__ uint32_t stage_of(uint32_t unit) const {
    const uint32_t behind = stage + unit;
    return behind < Traits::kDoStages ? behind : behind - Traits::kDoStages;
  }
  __device__ __forceinline__ uint32_t parity_of(uint32_t unit) const {
    return parity ^ (stage + unit >= Traits::kDoStages);
  }
  __device__ __forceinline__ void advance() {
    parity = parity_of(Traits::kDoUnits);
    stage = stage_of(Traits::kDoUnits);
  }
};

// ---- producer: one thread
// ------------------------------------------------------------------------------------------

// Whether a later split of the item writes its dV and dK.
template <class AnyItem>
__device__ __forceinline__ bool leaves_sums(const CommonParams& params, const AnyItem& item) {
  if constexpr (AnyItem::kRagged) {
    return false;
  } else {
    return item.split_item != kWhole && item.split + 1 < params.split.splits;
  }
}

// Coordinates of a box of rows from `row` on of a sequence of `length` rows, of which the first is
// the tensor's row `begin`, in a ragged map.
__device__ __forceinline__ RaggedRow row_of_sequence(int row, int batch, int rows_per_batch,
                                                     int begin, int length) {
  return RaggedRow::at(row, batch * rows_per_batch + begin, length);
}

template <class Traits>
struct Producer : Counters<Traits::kInPanels> {
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;

  using Item = ItemFor<Traits>;
  static_assert(sizeof(Item) == Traits::kItemBytes);
  // Read where it is used: there are too few registers to keep it.
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

  // A tile of queries. Of blocks that share an item each loads every second box, to both.
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

  // The same of a sequence.
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

  // Of a step of a sequence: lengths are in shared memory, and the consumers have no time for them.
  __device__ __forceinline__ uint32_t duties_of(const SharedItem& item, int tile_q) const {
    const int row = tile_q * Traits::kTileQ;
    const int last_row = min(row + Traits::kTileQ, length_q_of(params, item)) - 1;
    const int first_key = item.tile * Traits::kTileK;
    // The keys that all queries see are from `first_of_all` to before `end_of_all`, those that any
    // sees from `first` to before `end`.
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

  // Of each unit the blocks load every second box, to both.
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

  // The item itself comes with K.
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

  // attention_backward::copy_item, with the ticket in place of the item's gaps, which are the rest
  // of its last chunk: there are too few registers to keep it.
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

  // The next item, in its place. Blocks that share items get them from the first one.
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

  // K comes last of what an item begins with: it is the last to be given back. An item is taken
  // when it can begin, not before: others would wait for its parts of dQ all the while.
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

// ---- writers: one thread for each slot
// -----------------------------------------------------------------------------

// The first panel of dQ of a step that a consumer has, of which every second one is its.
__device__ __forceinline__ int first_panel(uint32_t step, int group) {
  return static_cast<int>((step + group) & 1);
}

template <class Traits>
struct Writer : Counters<Traits::kInPanels> {
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;
  using Counters<Traits::kInPanels>::slot_uses;
  using Counters<Traits::kInPanels>::holds;

  using Item = ItemFor<Traits>;
  using SharedItem = volatile Item;
  // What is known of an item in a turn: of ragged batches it is read where it is used.
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
  // A part of a tile of dQ, or of a panel of it.
  struct Part {
    uint32_t tile;    // of all tiles of dQ, or panels
    uint32_t before;  // parts that come before it
    bool last;
    uint32_t sum;  // in the workspace
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
      // There are sums for those tiles alone that need one.
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

  // Rows of 64 columns of what each consumer has.
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

  // The same of a panel. Where it belongs follows from the part: kept, that would cost registers.
  __device__ __forceinline__ void store_panel(const SharedItem& item, const Part& part) const {
    const int tile = static_cast<int>(part.tile / Traits::kPanels);
    const int panel = static_cast<int>(part.tile % Traits::kPanels);
    const int head_of_all = tile / params.tiles_q;
    ptx::tma_store(&params.dq, shared_slot, panel * kBoxColumns,
                   (tile - head_of_all * params.tiles_q) * Traits::kTileQ,
                   head_of_all - item.batch * params.heads_q, item.batch);
    ptx::tma_store_commit();
  }

  // Adds a panel to its sum. To wait until it is written and to give its turn on would take as long
  // as until the consumer has the next panel; so that is done behind the next one, unless there is
  // time before. Whose turn was not given on is kept beside the slot: there are too few registers.
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

  // Writes the part of a step, whose slot is offered, and offers the slot for what comes next in
  // it. It is the consumers' again when it was read; the turn goes on when all was written.
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

  // The same of the 64 keys of this slot's consumer, as many columns at a time as the slot holds.
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

  // A slot is of one consumer: its panels of dQ of all steps, then dV and dK.
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

  // Writers alternate over what leaves: parts of dQ of all steps, then dV and dK.
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

// ---- consumers: warpgroups
// ------------------------------------------------------------------------------------------

template <class Traits>
struct Consumer : Counters<Traits::kInPanels> {
  using ItsTraits = Traits;
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;
  using Counters<Traits::kInPanels>::holds;
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using ScoreMma = ptx::Wgmma<Element, Traits::kTileQ>;
  using KeyMma = ptx::Wgmma<Element, Traits::kDim>;
  using ValueMma = ptx::Wgmma<Element, Traits::kDimV>;
  using QueryMma = ptx::Wgmma<Element, Traits::kDqColumns>;
  static constexpr int kScores = Traits::kTileQ / 2;
  static constexpr int kSlices = Traits::kTileQ / 16;

  using Item = ItemFor<Traits>;
  using SharedItem = volatile Item;

  const ParamsFor<Traits>& params;
  const Barriers<Traits> barriers;
  const uint32_t shared;
  const Item* const shared_items;
  const int group;

  float dk[Traits::kDim / 2];
  float dv[Traits::kDimV / 2];
  float scores[kScores];    // S^T, then P^T
  uint32_t ds[kSlices][4];  // dS^T
  int row = 0;              // the step's first query
  bool add = false;         // to dk and dv

  __device__ __forceinline__ Consumer(const ParamsFor<Traits>& params_,
                                      const Barriers<Traits>& barriers_, uint32_t shared_,
                                      const Item* items_, int group_)
      : params(params_),
        barriers(barriers_),
        shared(shared_),
        shared_items(items_),
        group(group_) {}

  __device__ __forceinline__ uint32_t stage() const { return index % Traits::kStages; }
  __device__ __forceinline__ uint32_t parity() const { return index / Traits::kStages & 1; }
  __device__ __forceinline__ uint32_t dout_stage() const { return index % Traits::kDoStages; }
  __device__ __forceinline__ uint32_t dout_parity() const { return index / Traits::kDoStages & 1; }
  // Of the buffers of dS, and of slots. An item takes two slots more than it has steps.
  __device__ __forceinline__ uint32_t buffer() const { return index & 1; }
  __device__ __forceinline__ uint32_t slot_parity() const { return ((index >> 1) + items) & 1; }

  // Which 64 of the block's keys are this consumer's.
  __device__ __forceinline__ int key_group() const { return Traits::kByProducts ? 0 : group; }

  // Where tiles begin. By products as if it were another place each time: what follows from it,
  // ptxas would keep for the next step, where registers are too few.
  __device__ __forceinline__ uint32_t tiles() const {
    uint32_t begin = shared;
    if constexpr (Traits::kByProducts) asm volatile("" : "+r"(begin));
    return begin;
  }

  // K and V as A of S^T and dP^T: this consumer's keys. K as B of dQ: its columns, or all.
  __device__ __forceinline__ uint64_t k_rows() const {
    return ptx::swizzled_descriptor(
        tiles() + Traits::kKOffset + key_group() * Traits::kGroupBoxBytes, 16);
  }
  __device__ __forceinline__ uint64_t v_rows() const {
    return ptx::swizzled_descriptor(
        tiles() + Traits::kVOffset + key_group() * Traits::kGroupBoxBytes, 16);
  }
  __device__ __forceinline__ uint64_t k_columns() const {
    constexpr int kBytesOn = Traits::kDqColumns >= kBoxColumns
                                 ? Traits::kDqColumns / kBoxColumns * Traits::kKeyBoxBytes
                                 : Traits::kDqColumns * 2;
    return ptx::swizzled_descriptor(
        shared + Traits::kKOffset + (Traits::kSplitsColumns ? group * kBytesOn : 0),
        Traits::kKeyBoxBytes);
  }

  static __device__ __forceinline__ int thread_of_group() {
    return thread_index() % kThreadsPerGroup;
  }
  // The row of the warpgroup whose 16 bytes this lane's stmatrix stores, and which half of a slice.
  static __device__ __forceinline__ int matrix_row() {
    return warp_of_group() * 16 + lane_index() % 16;
  }
  static __device__ __forceinline__ int swizzled_chunk(int slice, int first_chunk = 0) {
    return swizzled_chunk(lane_index(), slice, first_chunk);
  }
  static __device__ __forceinline__ int swizzled_chunk(int lane, int slice, int first_chunk) {
    return ((slice % 4 * 2 + first_chunk + lane / 16) ^ (lane % 8)) * 16;
  }

  // A K-major operand: 16 columns on.
  static __device__ __forceinline__ uint64_t slice_of(uint64_t descriptor, int slice,
                                                      int box_bytes) {
    return ptx::advance(descriptor, slice / 4 * box_bytes + slice % 4 * 32);
  }

  // S^T = K Q^T, when Q is there.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t q =
        ptx::swizzled_descriptor(tiles() + Traits::kQOffset + stage() * Traits::kQBytes, 16);
    multiply_rows<Traits::kDim>(scores, k_rows(), q);
  }

  // dP^T = V dO^T. dO is there: dV was issued before.
  __device__ __forceinline__ void issue_dp(float (&dp)[kScores]) {
    const uint64_t dout =
        ptx::swizzled_descriptor(tiles() + Traits::kDoOffset + dout_stage() * Traits::kDoBytes, 16);
    multiply_rows<Traits::kDimV>(dp, v_rows(), dout);
  }

  // A product over columns of this consumer's keys and queries.
  template <int kColumns>
  __device__ __forceinline__ static void multiply_rows(float (&product)[kScores], uint64_t rows,
                                                       uint64_t queries) {
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < ceil_div(kColumns, 16); ++slice) {
      ScoreMma::multiply(product, slice_of(rows, slice, Traits::kKeyBoxBytes),
                         slice_of(queries, slice, Traits::kQueryBoxBytes), slice > 0);
    }
    ptx::wgmma_commit();
  }

  // dV += P^T dO and dK += dS^T Q. A product of A in registers is issued when it can run, so dS of
  // a slice is made between those of the slices before.
  __device__ __forceinline__ void issue_dv_and_dk(const float (&dp)[kScores],
                                                  uint32_t (&p)[kSlices][4], bool masked) {
    const uint64_t dout = ptx::swizzled_descriptor(
        shared + Traits::kDoOffset + dout_stage() * Traits::kDoBytes, Traits::kQueryBoxBytes);
    const uint64_t q = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + stage() * Traits::kQBytes, Traits::kQueryBoxBytes);
    ptx::pin(dv);
    ptx::pin(dk);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) ptx::pin(p[slice]);
    ptx::wgmma_fence();
    const uint32_t rows =
        shared + Traits::kDeltaOffset + dout_stage() * Traits::kRowBytes + lane_index() % 4 * 8;
    constexpr bool kAhead = !Traits::kCapped;  // where there are registers
    float2 delta[2];
    if (kAhead) load_delta(delta, rows);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (!kAhead) load_delta(delta, rows + 64 * slice);
      const float2 of_rows[2] = {delta[0], delta[1]};
      if (kAhead && slice + 1 < kSlices) load_delta(delta, rows + 64 * (slice + 1));
      ValueMma::multiply_values(dv, p[slice], ptx::advance(dout, slice * 2048), slice > 0 || add);
      make_ds(slice, dp, p[slice], of_rows, masked);
      ptx::pin(ds[slice]);
      ptx::wgmma_fence();
      KeyMma::multiply_values(dk, ds[slice], ptx::advance(q, slice * 2048), slice > 0 || add);
    }
    ptx::wgmma_commit();
  }

  // dQ = dS K of all keys: this consumer's rows or columns.
  __device__ __forceinline__ void issue_dq(float (&dq)[Traits::kDqRegisters],
                                           uint32_t place) const {
    const uint64_t k = k_columns();
    const uint64_t ds =
        ptx::swizzled_descriptor(shared + Traits::kDsOffset + place * Traits::kDsBytes +
                                     (Traits::kSplitsColumns ? 0 : group * Traits::kKeyBoxBytes),
                                 Traits::kKeyBoxBytes);
    multiply_dq(dq, ds, k);
  }
  static __device__ __forceinline__ void multiply_dq(float (&dq)[Traits::kDqRegisters], uint64_t ds,
                                                     uint64_t k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kTileK / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, slice * 2048), ptx::advance(k, slice * 2048),
                                slice > 0);
    }
    ptx::wgmma_commit();
  }

  // Of this thread's queries of a step, 2 (lane % 4) + 8 i and the one behind it, as many as lie
  // before `end`, as the lowest bits.
  static __device__ __forceinline__ uint32_t queries_before(int end, int lane) {
    const int within = max(0, end - 2 * (lane % 4));
    const int queries = within / 8 * 2 + min(within % 8, 2);
    return queries >= 32 ? ~0u : (1u << queries) - 1;
  }

  // The item at hand, whose sequence masks ask for; read where it is used.
  __device__ __forceinline__ const SharedItem& held_item() const {
    return shared_items[items % kItemsHeld];
  }

  // Whether some query of the step does not see all of this consumer's keys. Rows behind the last
  // have an lse of infinity.
  __device__ __forceinline__ bool is_masked(int first_key) const {
    if constexpr (Traits::kRagged) {
      return has_duty(kMaskedDuty);
    } else {
      const int last_row = min(row + Traits::kTileQ, params.seq_q) - 1;
      return params.score.first_key(last_row) > first_key ||
             params.score.end_key(row, params.seq_k) < first_key + kKeysPerGroup;
    }
  }
  // Of sequences: the producer has found out.
  __device__ __forceinline__ bool has_duty(uint32_t duty) const {
    return (ptx::load_shared_uint(barriers.stage_row(stage())) & duty << group) != 0;
  }

  // Of a key of this thread, the queries of the step that see it, as in queries_before.
  __device__ __forceinline__ uint32_t seen_by(int first_key, int half) const {
    static_assert(kScores / 2 <= 32, "a bit for each query of a key");
    const int lane = lane_index();
    const int key = first_key + warp_of_group() * 16 + lane / 4 + 8 * half;
    const SharedItem& item = held_item();
    if (key >= length_k_of(params, item)) return 0;
    return queries_before(attention_backward::end_query_of(params, item, key) - row, lane) &
           ~queries_before(attention_backward::first_query_of(params, item, key) - row, lane);
  }

  // Sets the probabilities of keys to 0 that a query does not see, and of those that do not exist,
  // or to -inf their powers: of scores from kBegin to before kEnd.
  template <int kBegin = 0, int kEnd = kScores>
  __device__ __forceinline__ void mask(int first_key, float hidden = 0.0f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t seen = seen_by(first_key, half);
#pragma unroll
      for (int i = kBegin / 2; i < kEnd / 2; ++i) {
        float& score = scores[i / 2 * 4 + 2 * half + i % 2];
        if ((seen & (1u << i)) == 0) score = hidden;
      }
    }
  }

  // Of this thread's queries of the step, those of these scores.
  template <int kBegin = 0, int kEnd = kScores>
  __device__ __forceinline__ void load_lse(float2 (&lse)[kScores / 4]) const {
    const uint32_t rows =
        shared + Traits::kLseOffset + stage() * Traits::kRowBytes + lane_index() % 4 * 8;
#pragma unroll
    for (int i = kBegin / 4; i < kEnd / 4; ++i) lse[i] = ptx::load_shared_float2(rows + 32 * i);
  }

  // P = exp2(S scale_log2 - lse) of these scores.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void exponentiate(const float2 (&lse)[kScores / 4]) {
    const float scale_log2 = params.score.scale_log2;
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const float2& of_rows = lse[i / 4];
      scores[i] =
          numeric::exp2_approx(fmaf(scores[i], scale_log2, -(i % 2 == 0 ? of_rows.x : of_rows.y)));
    }
  }
  // The same of capped scores t = tanh(S cap_ratio). It leaves P (1 - t^2) in scores.
  __device__ __forceinline__ void exponentiate_capped(uint32_t (&p)[kSlices][4],
                                                      const float2 (&lse)[kScores / 4],
                                                      int first_key) {
    const float scale_log2 = params.score.scale_log2;
    const uint32_t seen[2] = {seen_by(first_key, 0), seen_by(first_key, 1)};
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float probability[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * i + 2 * half + e];
          params.score.template cap<Softcap::kBrief>(score);
          probability[e] =
              numeric::exp2_approx(fmaf(score, scale_log2, -(e == 0 ? lse[i].x : lse[i].y)));
          if ((seen[half] & (1u << (2 * i + e))) == 0) probability[e] = 0.0f;
          score = probability[e] * fmaf(-score, score, 1.0f);
        }
        p[i / 2][i % 2 * 2 + half] = Numeric::pack(probability[0], probability[1]);
      }
    }
  }

  static __device__ __forceinline__ void pack(uint32_t (&packed)[kSlices][4],
                                              const float (&values)[kScores]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        packed[slice][r] = Numeric::pack(values[8 * slice + 2 * r], values[8 * slice + 2 * r + 1]);
      }
    }
  }

  // What dP - delta of two neighbouring scores is multiplied by: P, unless there is a softcap.
  __device__ __forceinline__ float2 factors(uint32_t packed, int pair) const {
    if constexpr (Traits::kUnpacksP) {
      return Numeric::unpack(packed);
    } else {
      return make_float2(scores[2 * pair], scores[2 * pair + 1]);
    }
  }

  // Of this thread's queries of a slice.
  static __device__ __forceinline__ void load_delta(float2 (&delta)[2], uint32_t rows) {
    delta[0] = ptx::load_shared_float2(rows);
    delta[1] = ptx::load_shared_float2(rows + 32);
  }

  // dS = P (dP - delta) of 16 queries, to registers and to shared memory. Where a query does not
  // see a key P is 0, but dP - delta may be NaN.
  __device__ __forceinline__ void make_ds(int slice, const float (&dp)[kScores],
                                          const uint32_t (&p)[4], const float2 (&delta)[2],
                                          bool masked) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = 4 * slice + 2 * i + half;
        const uint32_t packed = p[2 * i + half];
        const float2 difference =
            make_float2(dp[2 * pair] - delta[i].x, dp[2 * pair + 1] - delta[i].y);
        if constexpr (Traits::kMultipliesPairs) {
          ds[slice][2 * i + half] =
              numeric::multiply<Element>(packed, Numeric::pack(difference.x, difference.y));
        } else {
          const float2 factor = factors(packed, pair);
          ds[slice][2 * i + half] = Numeric::pack(factor.x * difference.x, factor.y * difference.y);
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int r = 0; r < 4; ++r) ds[slice][r] &= numeric::mask_of_nonzero<Element>(p[r]);
    }
    ptx::stmatrix_x4(ds_row() + slice / 4 * Traits::kKeyBoxBytes + swizzled_chunk(slice),
                     ds[slice][0], ds[slice][1], ds[slice][2], ds[slice][3]);
  }

  // The row of this step's buffer of dS whose chunks this lane's stmatrix stores.
  __device__ __forceinline__ uint32_t ds_row() const {
    return shared + Traits::kDsOffset + buffer() * Traits::kDsBytes +
           key_group() * Traits::kGroupBoxBytes + matrix_row() * kBoxRowBytes;
  }

  // The end of a step in which dS is zero.
  __device__ __forceinline__ void end_skipped() {
    const uint32_t store = ds_row();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::stmatrix_x4(store + slice / 4 * Traits::kKeyBoxBytes + swizzled_chunk(slice), 0, 0, 0,
                       0);
    }
    ptx::fence_proxy_async_shared();
    release(barriers.ds_full(buffer()));
    release(barriers.do_empty(dout_stage()));
    release(barriers.q_empty(stage()));
    ++index;
  }

  __device__ __forceinline__ uint32_t slot_of_group(uint32_t slot, int bytes_per_group) const {
    return shared + Traits::kSlotOffset + slot * Traits::kSlotBytes + group * bytes_per_group;
  }
  __device__ __forceinline__ void fill_slot(uint32_t slot) const {
    ptx::fence_proxy_async_shared();
    release(barriers.slot_full(slot));
  }

  // Of an item that is split every block but the last leaves its dV and dK, as [register][thread]
  // of both consumers. The last block adds them to its own, in their order; its ticket is the last,
  // so the others were taken before.
  struct Splits {
    const float* sums = nullptr;
    int count = 0;
    static constexpr int kStride = kConsumers * kThreadsPerGroup;

    // To four registers from `first` on.
    __device__ __forceinline__ void add_to(float (&values)[4], int first) const {
#pragma unroll
      for (int split = 0; split + 1 < attention_backward::kMostSplits; ++split) {
        if (split >= count) continue;
        float left[4];
        ptx::load_from_l2<kStride>(left, sums + split * Traits::kSplitFloats + first * kStride);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] += left[i];
      }
    }
  };
  struct NoSplits {
    __device__ __forceinline__ void add_to(float (&)[4], int) const {}
  };

  // 64 rows of a fragment as 16-bit elements, in boxes of 64 columns, of the first box from so many
  // chunks of 8 columns on.
  template <int kRegisters, class AnySplits = NoSplits>
  __device__ __forceinline__ void store_rows(uint32_t address, const float (&values)[kRegisters],
                                             float scale, int first_chunk = 0,
                                             const AnySplits& splits = {}) const {
    // In panels ptxas would keep the places of dS's chunks for these: there are too few registers.
    const int lane = Traits::kInPanels ? lane_id() : 0;
    const int row_of_group =
        Traits::kInPanels ? (thread_of_group() - lane) / 2 + lane % 16 : matrix_row();
    const uint32_t row = address + row_of_group * kBoxRowBytes;
#pragma unroll
    for (int slice = 0; slice < kRegisters / 8; ++slice) {
      uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = values[8 * slice + 4 * half + i];
        splits.add_to(four, 8 * slice + 4 * half);
        packed[2 * half] = Numeric::pack(four[0] * scale, four[1] * scale);
        packed[2 * half + 1] = Numeric::pack(four[2] * scale, four[3] * scale);
      }
      ptx::stmatrix_x4(
          row + slice / 4 * 64 * kBoxRowBytes +
              swizzled_chunk(Traits::kInPanels ? lane : lane_index(), slice, first_chunk),
          packed[0], packed[1], packed[2], packed[3]);
    }
  }

  // Marks of this consumer's keys of the item, of all or none.
  __device__ __forceinline__ uint2* marks_of_keys(uint2* marks, const SharedItem& item,
                                                  int group_of_tile, int first_column) const {
    if (marks == nullptr) return nullptr;
    return sm90_backward::marks_of_keys<Traits>(marks, number_of(params, item), group_of_tile,
                                                first_column);
  }

  // Lanes of this warp whose values of a row are not finite, of rows lane / 4 or of those 8 on.
  template <int kRegisters>
  static __device__ __forceinline__ uint32_t nonfinite_lanes(const float (&values)[kRegisters],
                                                             float scale, int half) {
    float sum = 0.0f;  // of zeros, unless a value is not finite
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      sum = fmaf(values[4 * i + 2 * half] * scale, 0.0f, sum);
      sum = fmaf(values[4 * i + 2 * half + 1] * scale, 0.0f, sum);
    }
    return __ballot_sync(kFullWarp, sum != 0.0f);
  }

  // Writes the fragment of 64 rows from `first_row` on, of which those before `end_row` exist, and
  // columns from `first_column` on. With `marks`, of its warps, rows that are not finite are marked
  // and left as they are.
  template <int kRegisters, class AnySplits = NoSplits>
  __device__ __forceinline__ void write_directly(const Direct& to,
                                                 const float (&values)[kRegisters], float scale,
                                                 int batch, int head, int first_row, int end_row,
                                                 int first_column, int end_column, uint2* marks,
                                                 const AnySplits& splits = {}) const {
    const int lane = lane_index();
    uint32_t withheld = 0;  // a bit for each of this lane's rows
    if (marks != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t lanes = nonfinite_lanes(values, scale, half);
        if (lane == 0) reinterpret_cast<uint32_t*>(marks + warp_of_group())[half] = lanes;
        if ((lanes >> (lane & ~3) & 0xf) != 0) withheld |= 1u << half;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_of_group() * 16 + lane / 4 + 8 * half;
      if (row >= end_row || (withheld & 1u << half) != 0) continue;
      const int64_t place =
          batch * to.strides.batch + head * to.strides.head + row * to.strides.seq;
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) {
        const int column = first_column + 8 * i + 2 * (lane % 4);
        if (column >= end_column) continue;
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = values[4 * i + e];
        splits.add_to(four, 4 * i);
        attention_backward::store_pair<Element>(to, place + column, params.accumulate != 0,
                                                four[2 * half] * scale, four[2 * half + 1] * scale);
      }
    }
  }

  __device__ __forceinline__ void write_dq_directly(const float (&dq)[Traits::kDqRegisters],
                                                    uint32_t tile) const {
    const uint32_t tile_of_all = tile / Traits::kPanels;
    const int head_of_all = tile_of_all / params.tiles_q;
    int tile_q = tile_of_all - head_of_all * params.tiles_q;
    int batch = head_of_all / params.heads_q;
    int begin = 0;
    int seq_q = params.seq_q;
    const int head = head_of_all - batch * params.heads_q;
    if constexpr (Traits::kRagged) {
      const SharedItem& item = held_item();
      tile_q -= item.first_tile;
      batch = item.batch_q;
      begin = item.begin_q;
      seq_q = begin + item.length_q;
    }
    const int first_column = Traits::kSplitsColumns
                                 ? group * Traits::kDqColumns
                                 : tile % Traits::kPanels * Traits::kPanelColumns;
    const int group_of_tile = Traits::kTileQ == 64 ? 0 : group;
    write_directly(params.dq_direct, dq, params.scale, batch, head,
                   begin + tile_q * Traits::kTileQ + 64 * group_of_tile, seq_q, first_column,
                   params.dim,
                   marks_of_dq<Traits>(params.withheld, tile_of_all, group_of_tile, first_column));
  }

  // Stores the part of dQ of the step before in a slot, which `fill_slot` then hands to the writer.
  __device__ __forceinline__ void store_dq(float (&dq)[Traits::kDqRegisters]) {
    const uint32_t step = index - 1;
    const uint32_t place = step & 1;
    ptx::mbarrier_wait(barriers.slot_ready(place), ((step >> 1) + items) & 1);
    fill_with_dq(dq, place, slot_of_group(place, Traits::kDqBytesPerGroup));
  }
  // At `slot` in the slot of this index, whose use says what of.
  __device__ __forceinline__ void fill_with_dq(float (&dq)[Traits::kDqRegisters], uint32_t place,
                                               uint32_t slot) const {
    const uint32_t fragment = slot + thread_of_group() * 16;
    constexpr int kChunkBytes = kThreadsPerGroup * 16;
    const uint32_t use = ptx::load_shared_uint(barriers.slot_use(place));
    if (use == kPart) {
#pragma unroll
      for (int i = 0; i < Traits::kDqRegisters / 4; ++i) {
        ptx::store_shared(fragment + i * kChunkBytes,
                          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
      }
    } else {
      if (use == kLastPart) {
#pragma unroll
        for (int i = 0; i < Traits::kDqRegisters / 4; ++i) {
          const float4 sum = ptx::load_shared_float4(fragment + i * kChunkBytes);
          dq[4 * i] += sum.x;
          dq[4 * i + 1] += sum.y;
          dq[4 * i + 2] += sum.z;
          dq[4 * i + 3] += sum.w;
        }
      }
      if (params.dq_direct.rows != nullptr) {
        write_dq_directly(dq, ptx::load_shared_uint(barriers.slot_tile(place)));
        return;
      }
      if (use == kLastPart) {
        // Rows overwrite what others read. A consumer may be in a step that the other skips.
        if (Traits::kSharesDqBox) {
          ptx::named_barrier_sync_apart(kDsBarrier, kConsumers * kThreadsPerGroup);
        } else {
          ptx::named_barrier_sync(kGroupBarrier + group, kThreadsPerGroup);
        }
      }
      if (Traits::kSharesDqBox) {
        store_rows(slot_of_group(place, 0), dq, params.scale, group * (Traits::kDqColumns / 8));
      } else {
        store_rows(slot, dq, params.scale);
      }
    }
  }
  __device__ __forceinline__ void hand_over_dq() const { fill_slot((index - 1) & 1); }

  // A whole step but for its dQ, and dQ of the step before. No product is under way before and
  // behind it.
  template <bool kFirst>
  __device__ __forceinline__ void step(int first_key, bool last) {
    float dp[kScores];
    float dq[Traits::kDqRegisters];
    uint32_t p[kSlices][4];
    float2 lse[kScores / 4];
    constexpr int kEarly = Traits::kEarlyPowers;
    constexpr int kHeld = kEarly < kScores ? kEarly / 2 : kScores;
    load_lse<0, kEarly>(lse);
    issue_scores();
    if (!kFirst) issue_dq_before(dq);
    const bool masked = Traits::kCapped || is_masked(first_key);  // no register for the answer
    ptx::wgmma_wait<kFirst ? 0 : 1>();                            // S
    ptx::pin(scores);
    if constexpr (Traits::kCapped) {
      exponentiate_capped(p, lse, first_key);
    } else {
      exponentiate<0, kEarly>(lse);
      if (masked) mask<0, kHeld>(first_key);
      if (kEarly == kScores) pack(p, scores);
    }
    if (!kFirst) {
      ptx::wgmma_wait<0>();  // dQ
      ptx::pin(dq);
      store_dq(dq);
    }
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    issue_dp(dp);
    if (kEarly < kScores) load_lse<kEarly, kScores>(lse);
    if (!kFirst) hand_over_dq();
    if constexpr (kEarly < kScores) {
      // Some masks are put off to here: without a branch ptxas would put exponentials between the
      // products of dP.
      if (masked) mask<kHeld, kEarly>(first_key);
      exponentiate<kEarly, kScores>(lse);
      if (masked) mask<kEarly, kScores>(first_key);
      pack(p, scores);
    }
    ptx::wgmma_wait<0>();  // dP
    ptx::pin(dp);
    if (last) release(barriers.v_empty());
    issue_dv_and_dk(dp, p, masked);
    ptx::fence_proxy_async_shared();
    release(barriers.ds_full(buffer()));
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(dk);
    release(barriers.do_empty(dout_stage()));  // delta came with dO
    release(barriers.q_empty(stage()));
    ++index;
    add = true;
  }

  // Whether no query of the step sees a key of this consumer. That is seldom so with 128 queries.
  __device__ __forceinline__ bool is_unseen(int first_key) const {
    if constexpr (Traits::kTileQ != kKeysPerGroup) {
      return false;
    } else if constexpr (Traits::kRagged) {
      return has_duty(kUnseenDuty);
    } else {
      const int last_row = min(row + Traits::kTileQ, params.seq_q) - 1;
      return params.score.end_key(last_row, params.seq_k) <= first_key ||
             params.score.first_key(row) >= first_key + kKeysPerGroup;
    }
  }

  // A step in which dS is zero.
  template <bool kFirst>
  __device__ __forceinline__ void skip(bool last) {
    if constexpr (!kFirst) {
      float dq[Traits::kDqRegisters];
      issue_dq_before(dq);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      store_dq(dq);
      hand_over_dq();
    }
    // Phases are waited for one by one.
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    if (last) release(barriers.v_empty());
    end_skipped();
  }

  // dQ of the step before.
  __device__ __forceinline__ void issue_dq_before(float (&dq)[Traits::kDqRegisters]) {
    const uint32_t before = index - 1;
    ptx::mbarrier_wait(barriers.ds_full(before & 1), before >> 1 & 1);
    issue_dq(dq, before & 1);
  }

  // What is left of the last step.
  __device__ __forceinline__ void finish() {
    float dq[Traits::kDqRegisters];
    issue_dq_before(dq);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(barriers.k_empty());
    store_dq(dq);
    hand_over_dq();
  }

  __device__ __forceinline__ void clear_keys() {
#pragma unroll
    for (int i = 0; i < Traits::kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kDimV / 2; ++i) dv[i] = 0.0f;
  }

  template <int kRegisters>
  static __device__ __forceinline__ void leave(float* to, const float (&values)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
      ptx::store_global<Splits::kStride>(to + i * Splits::kStride, four);
    }
  }

  __device__ __forceinline__ float* split_sums(int split_item, int split) const {
    const int64_t place = static_cast<int64_t>(split_item) * (params.split.splits - 1) + split;
    return params.split_sums + place * Traits::kSplitFloats + group * kThreadsPerGroup +
           thread_of_group();
  }

  __device__ __forceinline__ void leave_sums(int split_item, int split) const {
    float* const to = split_sums(split_item, split);
    leave(to, dv);
    leave(to + Traits::kDimV / 2 * Splits::kStride, dk);
    __syncwarp();
    if (lane_index() == 0) ptx::add_release(params.split_turns + split_item, 1);
  }

  __device__ __forceinline__ Splits wait_for_splits(int split_item, int count) const {
    constexpr int kWarps = 4 * kConsumers;
    ptx::wait_for_word(params.split_turns + split_item, static_cast<uint32_t>(kWarps * count));
    return {split_sums(split_item, 0), count};
  }

  __device__ __forceinline__ void write_keys() const {
    Splits splits;
    bool leaves = false;
    if constexpr (!Traits::kRagged) {
      const Item* const item = shared_items + items % kItemsHeld;
      const int split_item = __shfl_sync(kFullWarp, item->split_item, 0);
      const int split = __shfl_sync(kFullWarp, item->split, 0);
      leaves = split_item != kWhole && split + 1 < params.split.splits;
      if (leaves) {
        leave_sums(split_item, split);
      } else if (split_item != kWhole) {
        splits = wait_for_splits(split_item, split);
      }
    }
    const uint32_t first = buffer();
    ptx::mbarrier_wait(barriers.slot_ready(first), slot_parity());
    if (!leaves) {
      write_keys<Traits::kBoxesV>(params.dv_direct, params.withheld.dv, dv, 1.0f, splits, first,
                                  params.dim_v);
    }
    fill_slot(first);
    const uint32_t second = first ^ 1;
    ptx::mbarrier_wait(barriers.slot_ready(second), (((index + 1) >> 1) + items) & 1);
    if (!leaves) {
      if (splits.count > 0) splits.sums += Traits::kDimV / 2 * Splits::kStride;
      write_keys<Traits::kBoxes>(params.dk_direct, params.withheld.dk, dk, params.scale, splits,
                                 second, params.dim);
    }
    fill_slot(second);
  }

  template <int kColumnBoxes, int kRegisters>
  __device__ __forceinline__ void write_keys(const Direct& direct, uint2* marks,
                                             const float (&values)[kRegisters], float scale,
                                             const Splits& splits, uint32_t slot,
                                             int columns) const {
    if (direct.rows == nullptr) {
      const uint32_t to = slot_of_group(slot, kColumnBoxes * Traits::kGroupBoxBytes);
      if (Traits::kRagged || splits.count == 0) {
        store_rows(to, values, scale);
      } else {
        store_rows(to, values, scale, 0, splits);
      }
    } else {
      const SharedItem& item = shared_items[items % kItemsHeld];
      const int begin = begin_k_of(item);
      write_directly(direct, values, scale, batch_k_of(item), item.head_kv,
                     begin + item.tile * Traits::kTileK + group * kKeysPerGroup,
                     begin + length_k_of(params, item), 0, columns,
                     marks_of_keys(marks, item, group, 0), splits);
    }
  }

  template <bool kFirst>
  __device__ __forceinline__ void take_step(const Steps& steps, int first_key) {
    row = steps.tile_q * Traits::kTileQ;
    const bool last = steps.left == 1;
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
    if (is_unseen(first_key)) {
      skip<kFirst>(last);
    } else {
      step<kFirst>(first_key, last);
    }
  }

  __device__ __forceinline__ void compute(Steps steps, bool down, int first_key) {
    add = false;
    ptx::mbarrier_wait(barriers.v_full(), items & 1);
    take_step<true>(steps, first_key);
#pragma unroll 1
    while (steps.left > 1) {
      steps.advance(down, params.heads_per_kv);
      take_step<false>(steps, first_key);
    }
    finish();
    if (!add) clear_keys();
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      const Item* const shared_item = shared_items + items % kItemsHeld;
      Item item;
      item.tile = __shfl_sync(kFullWarp, shared_item->tile, 0);
      item.begin = __shfl_sync(kFullWarp, shared_item->begin, 0);
      item.end = __shfl_sync(kFullWarp, shared_item->end, 0);
      item.course = __shfl_sync(kFullWarp, shared_item->course, 0);
      if (item.tile == kNoItem) break;
      const Steps steps(item, params.heads_per_kv);
      if (steps.left == 0) {
        release(barriers.k_empty());
        release(barriers.v_empty());
        clear_keys();
      } else {
        compute(steps, runs_down(item), item.tile * Traits::kTileK + group * kKeysPerGroup);
      }
      write_keys();
      ++items;
    }
  }
};

}  // namespace flashmoe::sm90_backward
