// Work items, and the order in which parts of dQ are added.
//
// An item is a tile of keys of one KV head. It runs over the query tiles that see some of its keys,
// for each query head of the KV head. The last items may be split (params.h). Blocks take items by
// a ticket, so a block that takes an item knows that all earlier ones have been taken. The parts of
// a tile of dQ are added in the order of the tickets of their items: a block only waits for earlier
// tickets. The block with the earliest unfinished ticket waits for nobody, so there is no deadlock,
// however many blocks run at a time.
//
// Under a causal mask most heads descend: their last keys come first, and an item runs upwards from
// its first query tile. That tile is on the diagonal, so neighbouring items of a head are at
// different tiles of dQ in each step, and reach each tile in the order of their tickets. None waits
// for another, and the next addition to a sum finds it in the L2. But the longest items come last.
// So the last heads, with up to two items per block, ascend: their longest items come first and run
// downwards. All items of a head begin with the same query tile; heads of a group alternate, so
// that few items wait for each other.
//
// If many query heads share a KV head, all heads ascend, in waves of one item per block. Items of
// the first wave run downwards and end at their diagonals, the last keys first. An item that then
// began with the last query tile would be many steps away from its neighbours, and their shared
// data would leave the L2 in between. So items of the next wave run upwards from their diagonals,
// where the items before them have ended. Each runs beside the others of its wave and ends with
// them. In a wave that runs downwards the last keys have the first ticket: items then end in the
// order in which their successors are to begin, a step or two apart.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/params.h"

namespace flashmoe::attention_backward {

// Whether a kernel takes a bias and a mask.
template <class Traits, class = void>
inline constexpr bool kIsBiased = false;
template <class Traits>
inline constexpr bool kIsBiased<Traits, std::enable_if_t<Traits::kBiased>> = true;

// Whether a kernel's items may run in waves.
template <class Traits, class = void>
inline constexpr bool kHasWaves = false;
template <class Traits>
inline constexpr bool kHasWaves<Traits, std::enable_if_t<(Traits::kWaveHeads > 0)>> = true;

// The direction of an item, and the order of its part of a tile of dQ among those of its head. In
// waves that run downwards, parts of the `above` tiles above an item's come before its own, and
// those of the `below` tiles below it after. All other parts, including those of all other
// ascending items, are in the order of their tiles.
struct Course {
  static constexpr int kDescends = 0;  // parts of all tiles above come first; runs upwards
  static constexpr int kDown = 1;      // all items that ascend without waves
  static constexpr int kUp = 2;
  static __device__ __forceinline__ int down(int above, int below) {
    return below << 16 | above << 2 | kDown;
  }
  static __device__ __forceinline__ int above(int course) { return course >> 2 & 0x3fff; }
  static __device__ __forceinline__ int below(int course) { return course >> 16; }
};
// The version without waves needs a register less.
template <bool kWaves = true, class AnyItem>
__device__ __forceinline__ bool runs_down(const AnyItem& item) {
  return kWaves ? (item.course & Course::kDown) != 0 : item.course != 0;
}

inline constexpr int kNoItem = -1;
inline constexpr int kWhole = -1;

// ---- where rows are --------------------------------------------------------------------------

// `of` is an item, or a part of a gradient. In dense batches the parameters hold for all; in ragged
// ones (kRagged) each `of` knows its sequence (ragged.cuh). `of` may be volatile.
template <class Of>
__device__ __forceinline__ int batch_q_of(const Of& of) {
  if constexpr (Of::kRagged) {
    return of.batch_q;
  } else {
    return of.batch;
  }
}
template <class Of>
__device__ __forceinline__ int batch_k_of(const Of& of) {
  if constexpr (Of::kRagged) {
    return of.batch_k;
  } else {
    return of.batch;
  }
}
// The rows of query 0 and of key 0 in the tensors.
template <class Of>
__device__ __forceinline__ int begin_q_of(const Of& of) {
  if constexpr (Of::kRagged) {
    return of.begin_q;
  } else {
    return 0;
  }
}
template <class Of>
__device__ __forceinline__ int begin_k_of(const Of& of) {
  if constexpr (Of::kRagged) {
    return of.begin_k;
  } else {
    return 0;
  }
}
template <class Of>
__device__ __forceinline__ int length_q_of(const CommonParams& params, const Of& of) {
  if constexpr (Of::kRagged) {
    return of.length_q;
  } else {
    return params.seq_q;
  }
}
template <class Of>
__device__ __forceinline__ int length_k_of(const CommonParams& params, const Of& of) {
  if constexpr (Of::kRagged) {
    return of.length_k;
  } else {
    return params.seq_k;
  }
}
// The first tile of a query head in the workspace, for values of rows and for turns.
template <class Of>
__device__ __forceinline__ int tile_of_head(const CommonParams& params, const Of& of, int head) {
  if constexpr (Of::kRagged) {
    return head * params.tiles_q + of.first_tile;
  } else {
    return (of.batch * params.heads_q + head) * params.tiles_q;
  }
}

// Visible keys of a query, and queries that see a key: ScoreOptions with the sequence's diagonal.
template <class Of>
__device__ __forceinline__ int diagonal_of(const Of& of) {
  if constexpr (Of::kRagged) {
    return of.diagonal;
  } else {
    return 0;
  }
}
template <class Of>
__device__ __forceinline__ int first_key_of(const CommonParams& params, const Of& of, int query) {
  return params.score.first_key(query + diagonal_of(of));
}
template <class Of>
__device__ __forceinline__ int end_key_of(const CommonParams& params, const Of& of, int query) {
  return params.score.end_key(query + diagonal_of(of), length_k_of(params, of));
}
template <class Of>
__device__ __forceinline__ int first_query_of(const CommonParams& params, const Of& of, int key) {
  return params.score.first_query(key - diagonal_of(of));
}
template <class Of>
__device__ __forceinline__ int end_query_of(const CommonParams& params, const Of& of, int key) {
  return params.score.end_query(key - diagonal_of(of), length_q_of(params, of));
}

// ---- items -----------------------------------------------------------------------------------

// Sets the tile and course of the position-th item of so many heads of `tiles_k` tiles. Returns its
// head.
template <class Traits, class AnyItem>
__device__ __forceinline__ int take_turn(const HeadOrder& order, int heads, int tiles_k,
                                         int position, AnyItem& item) {
  const int descending_items = order.descending * tiles_k;
  const bool ascends = position >= descending_items;
  const int begin = ascends ? order.descending : 0;
  const int end = ascends ? heads : order.descending;
  const int group_heads = ascends ? order.ascending_group : order.descending_group;
  const int group_items = group_heads * tiles_k;
  const int of_order = position - (ascends ? descending_items : 0);
  const int group = of_order / group_items;
  const int rank = of_order - group * group_items;
  const int first_head = begin + group * group_heads;
  const int heads_of_group = min(group_heads, end - first_head);
  const int turn = rank / heads_of_group;
  item.tile = ascends ? turn : tiles_k - 1 - turn;
  item.course = ascends ? Course::kDown : Course::kDescends;
  if (kHasWaves<Traits> && ascends && order.wave_tiles > 0) {
    const int wave = turn / order.wave_tiles;
    const int first = wave * order.wave_tiles;
    const int last = min(first + order.wave_tiles, tiles_k) - 1;
    if (wave % 2 == 0) {
      item.tile = last - (turn - first);
      item.course = Course::down(last - item.tile, item.tile - first);
    } else {
      item.course = Course::kUp;
    }
  }
  return first_head + rank - turn * heads_of_group;
}

// Finds the query tiles that see keys of an item. The item keeps its initial range 0 to 0 if there
// are none.
template <class Traits, class AnyItem>
__device__ __forceinline__ void find_queries(const CommonParams& params, AnyItem& item) {
  const int first_key = item.tile * Traits::kTileK;
  const int last_key = min(first_key + Traits::kTileK, length_k_of(params, item)) - 1;
  const int first = first_query_of(params, item, first_key);
  const int behind = end_query_of(params, item, last_key);
  if (first < behind) {
    item.begin = first / Traits::kTileQ;
    item.end = (behind - 1) / Traits::kTileQ + 1;
  }
}

struct alignas(16) Item {
  static constexpr bool kRagged = false;

  int batch;
  int head_kv;
  int tile;   // key tile; kNoItem: no more items
  int begin;  // query tiles, from `begin` to before `end`
  int end;
  int course;      // a Course
  int split_item;  // index among split items, or kWhole
  int split;       // split of the item

  template <class Traits>
  static __device__ __forceinline__ Item at(const CommonParams& params, int ticket) {
    Item item = {};
    item.tile = kNoItem;
    item.split_item = kWhole;
    int position = ticket;
    if (ticket >= params.split.first) {
      item.split_item = (ticket - params.split.first) / params.split.splits;
      item.split = ticket - params.split.first - item.split_item * params.split.splits;
      position = params.split.first + item.split_item;
    }
    const int heads = params.batch * params.heads_kv;
    if (position >= heads * params.tiles_k) return item;
    const int head = take_turn<Traits>(params.order, heads, params.tiles_k, position, item);
    item.batch = head / params.heads_kv;
    item.head_kv = head - item.batch * params.heads_kv;
    find_queries<Traits>(params, item);
    if (item.split_item != kWhole) {
      const int tiles = item.end - item.begin;
      item.end = item.begin + tiles * (item.split + 1) / params.split.splits;
      item.begin += tiles * item.split / params.split.splits;
    }
    return item;
  }
};

// The key tiles that have a part of a tile of dQ.
struct Parts {
  int first;
  int last;  // below `first`: no parts

  template <class Traits, class Of>
  static __device__ __forceinline__ Parts of(const CommonParams& params, const Of& of, int tile_q) {
    const int first_row = tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, length_q_of(params, of)) - 1;
    const int first_key = first_key_of(params, of, first_row);
    const int end_key = end_key_of(params, of, last_row);
    if (first_key >= end_key) return {0, -1};
    return {first_key / Traits::kTileK, (end_key - 1) / Traits::kTileK};
  }

  // For a dense batch, whose sequences are all alike.
  template <class Traits>
  static __device__ __forceinline__ Parts of(const CommonParams& params, int tile_q) {
    return of<Traits>(params, Item{}, tile_q);
  }

  // The number of parts that are added before an item's.
  template <class Traits, class AnyItem>
  __device__ __forceinline__ int before(const AnyItem& item) const {
    const int course = item.course;
    const int tile = item.tile;
    if (course == Course::kDescends) return last - tile;
    if constexpr (kHasWaves<Traits>) {
      return max(tile - Course::below(course), first) - first +
             min(tile + Course::above(course), last) - tile;
    } else {
      return tile - first;
    }
  }
};

}  // namespace flashmoe::attention_backward
