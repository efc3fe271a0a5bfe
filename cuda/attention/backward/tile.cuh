// Items of work, and the order in which parts of dQ are added.
//
// An item is a tile of keys of one KV head. It runs over the query tiles that see some of its keys,
// of each query head of the KV head. Blocks take items by a ticket, so whoever takes one knows that
// all before it were taken. The parts of a tile of dQ are added in the order of the tickets of
// their items: whom a block waits for has an earlier ticket. The block with the earliest ticket
// that is not done waits for nobody, so there is no deadlock, whatever the number of blocks that
// run at a time.
//
// Most heads descend: their last keys come first, and an item runs from its first query tile
// upwards. Under a causal mask that is the tile on the diagonal, so side by side the items of a
// head are at different tiles of dQ in each step, which they come to in the order of their tickets:
// none waits for another. But the longest items come last. So the last heads, as many as have two
// items for each block, ascend: their longest items come first and run downwards. All of a head
// begin with the same query tile; its neighbours' heads alternate with it, so that items which wait
// for each other are few.
#pragma once

#include "cuda/attention/backward/params.h"

namespace flashmoe::attention_backward {

inline constexpr int kNoItem = -1;

struct alignas(16) Item {
  int batch;
  int head_kv;
  int tile;   // of keys; kNoItem: there are no more
  int begin;  // query tiles: from `begin` to the one before `end`
  int end;
  int ascends;  // 0 or 1
  int unused[2];

  template <class Traits>
  static __device__ __forceinline__ Item at(const CommonParams& params, int position) {
    Item item = {};
    item.tile = kNoItem;
    const int heads = params.batch * params.heads_kv;
    if (position >= heads * params.tiles_k) return item;
    const int descending_items = params.heads_descending * params.tiles_k;
    item.ascends = position >= descending_items;
    int head;
    if (item.ascends) {
      const int rank = position - descending_items;
      const int heads_ascending = heads - params.heads_descending;
      item.tile = rank / heads_ascending;
      head = params.heads_descending + rank - item.tile * heads_ascending;
    } else {
      const int group_items = params.heads_per_group * params.tiles_k;
      const int group = position / group_items;
      const int rank = position - group * group_items;
      const int first_head = group * params.heads_per_group;
      const int heads_of_group = min(params.heads_per_group, params.heads_descending - first_head);
      const int from_last = rank / heads_of_group;
      item.tile = params.tiles_k - 1 - from_last;
      head = first_head + rank - from_last * heads_of_group;
    }
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
  __device__ __forceinline__ int before(const Item& item) const {
    return item.ascends ? item.tile - first : last - item.tile;
  }
};

}  // namespace flashmoe::attention_backward
