// Items of work, and the order in which parts of dQ are added.
//
// An item is a tile of keys of one KV head. It runs over the query tiles that see some of its keys,
// of each query head of the KV head. The last items may be split: params.h. Blocks take items by a
// ticket, so whoever takes one knows that all before it were taken. The parts of a tile of dQ are
// added in the order of the tickets of their items: whom a block waits for has an earlier ticket.
// The block with the earliest ticket that is not done waits for nobody, so there is no deadlock,
// whatever the number of blocks that run at a time.
//
// Under a causal mask most heads descend: their last keys come first, and an item runs from its
// first query tile upwards. That is the tile on the diagonal, so side by side the items of a head
// are at different tiles of dQ in each step, which they come to in the order of their tickets: none
// waits for another, and a sum is added to again while it is in the L2. But the longest items come
// last. So the last heads, as many as have up to two items for each block, ascend: their longest
// items come first and run downwards. All of a head begin with the same query tile; heads of a
// group alternate, so that items which wait for each other are few.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/params.h"

namespace flashmoe::attention_backward {

// Whether a kernel takes a bias and a mask.
template <class Traits, class = void>
inline constexpr bool kIsBiased = false;
template <class Traits>
inline constexpr bool kIsBiased<Traits, std::enable_if_t<Traits::kBiased>> = true;

inline constexpr int kNoItem = -1;
inline constexpr int kWhole = -1;

// ---- where rows are --------------------------------------------------------------------------

// Of an item, or of a part of a gradient. In dense batches all are as the parameters say; in ragged
// ones (kRagged) each knows its sequence (ragged.cuh). `of` may be volatile.
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
// The tensors' rows of query 0 and of key 0.
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
// The first tile of a query head in the workspace: of numbers of rows, and of turns.
template <class Of>
__device__ __forceinline__ int tile_of_head(const CommonParams& params, const Of& of, int head) {
  if constexpr (Of::kRagged) {
    return head * params.tiles_q + of.first_tile;
  } else {
    return (of.batch * params.heads_q + head) * params.tiles_q;
  }
}

// What a query sees, and what sees a key: ScoreOptions by the diagonal of the sequence.
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

// The position-th of the items of so many heads of `tiles_k` tiles: its tile, and whether its head
// ascends. Returns that head.
template <class AnyItem>
__device__ __forceinline__ int take_turn(const HeadOrder& order, int heads, int tiles_k,
                                         int position, AnyItem& item) {
  const int descending_items = order.descending * tiles_k;
  item.ascends = position >= descending_items;
  const int begin = item.ascends ? order.descending : 0;
  const int end = item.ascends ? heads : order.descending;
  const int group_heads = item.ascends ? order.ascending_group : order.descending_group;
  const int group_items = group_heads * tiles_k;
  const int of_order = position - (item.ascends ? descending_items : 0);
  const int group = of_order / group_items;
  const int rank = of_order - group * group_items;
  const int first_head = begin + group * group_heads;
  const int heads_of_group = min(group_heads, end - first_head);
  const int turn = rank / heads_of_group;
  item.tile = item.ascends ? turn : tiles_k - 1 - turn;
  return first_head + rank - turn * heads_of_group;
}

// The query tiles that see keys of an item; none is from 0 to 0, as an item begins.
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
  int tile;   // of keys; kNoItem: there are no more
  int begin;  // query tiles: from `begin` to the one before `end`
  int end;
  int ascends;     // 0 or 1
  int split_item;  // among those that are split, or kWhole
  int split;       // of the item

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
    const int head = take_turn(params.order, heads, params.tiles_k, position, item);
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
  int last;  // below `first`: there are none

  template <class Traits, class Of>
  static __device__ __forceinline__ Parts of(const CommonParams& params, const Of& of, int tile_q) {
    const int first_row = tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, length_q_of(params, of)) - 1;
    const int first_key = first_key_of(params, of, first_row);
    const int end_key = end_key_of(params, of, last_row);
    if (first_key >= end_key) return {0, -1};
    return {first_key / Traits::kTileK, (end_key - 1) / Traits::kTileK};
  }

  // Of a dense batch, whose sequences are all alike.
  template <class Traits>
  static __device__ __forceinline__ Parts of(const CommonParams& params, int tile_q) {
    return of<Traits>(params, Item{}, tile_q);
  }

  // How many are added ahead of an item's.
  template <class AnyItem>
  __device__ __forceinline__ int before(const AnyItem& item) const {
    return item.ascends ? item.tile - first : last - item.tile;
  }
};

}  // namespace flashmoe::attention_backward
