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

#include "cuda/attention/backward/params.h"

namespace flashmoe::attention_backward {

inline constexpr int kNoItem = -1;
inline constexpr int kWhole = -1;

struct alignas(16) Item {
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
    const HeadOrder& order = params.order;
    const int descending_items = order.descending * params.tiles_k;
    item.ascends = position >= descending_items;
    const int begin = item.ascends ? order.descending : 0;
    const int end = item.ascends ? heads : order.descending;
    const int group_heads = item.ascends ? order.ascending_group : order.descending_group;
    const int group_items = group_heads * params.tiles_k;
    const int of_order = position - (item.ascends ? descending_items : 0);
    const int group = of_order / group_items;
    const int rank = of_order - group * group_items;
    const int first_head = begin + group * group_heads;
    const int heads_of_group = min(group_heads, end - first_head);
    const int turn = rank / heads_of_group;
    item.tile = item.ascends ? turn : params.tiles_k - 1 - turn;
    const int head = first_head + rank - turn * heads_of_group;
    item.batch = head / params.heads_kv;
    item.head_kv = head - item.batch * params.heads_kv;
    const int first_key = item.tile * Traits::kTileK;
    const int last_key = min(first_key + Traits::kTileK, params.seq_k) - 1;
    const int first = params.score.first_query(first_key);
    const int behind = params.score.end_query(last_key, params.seq_q);
    if (first < behind) {
      item.begin = first / Traits::kTileQ;
      item.end = (behind - 1) / Traits::kTileQ + 1;
    }
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

  template <class Traits>
  static __device__ __forceinline__ Parts of(const CommonParams& params, int tile_q) {
    const int first_row = tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, params.seq_q) - 1;
    const int first_key = params.score.first_key(first_row);
    const int end_key = params.score.end_key(last_row, params.seq_k);
    if (first_key >= end_key) return {0, -1};
    return {first_key / Traits::kTileK, (end_key - 1) / Traits::kTileK};
  }

  // How many are added ahead of an item's.
  template <class AnyItem>
  __device__ __forceinline__ int before(const AnyItem& item) const {
    return item.ascends ? item.tile - first : last - item.tile;
  }
};

}  // namespace flashmoe::attention_backward
