// Items of work, the steps of queries that they need, and the order in which parts of dQ are added.
//
// An item is a tile of keys of one KV head. It runs over the query tiles that see some of its keys,
// of each query head of the KV head. Blocks take items by a ticket, so whoever takes one knows that
// all before it were taken. The parts of a tile of dQ are added in the order of their key tiles,
// and items of a head come in that order too: whom a block waits for has an earlier ticket. The
// block with the earliest ticket that is not done waits for nobody, so there is no deadlock,
// whatever the number of blocks that run at a time. The heads of a group alternate, so that items
// which would wait for each other from step to step are few.
#pragma once

#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

inline constexpr int kNoItem = -1;

struct alignas(16) Item {
  int batch;
  int head_kv;
  int tile;   // of keys; kNoItem: there are no more
  int begin;  // query tiles: from `begin` to the one before `end`
  int end;
  int unused[3];

  template <class Traits>
  static __device__ __forceinline__ Item at(const Params& params, int position) {
    Item item = {};
    item.tile = kNoItem;
    const int heads = params.batch * params.heads_kv;
    if (position >= heads * params.tiles_k) return item;
    const int group_items = params.heads_per_group * params.tiles_k;
    const int group = position / group_items;
    const int rank = position - group * group_items;
    const int first_head = group * params.heads_per_group;
    const int heads_of_group = min(params.heads_per_group, heads - first_head);
    item.tile = rank / heads_of_group;
    const int head = first_head + rank - item.tile * heads_of_group;
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

static_assert(sizeof(Item) == kItemBytes);

// The key tiles that have a part of a tile of dQ.
struct Parts {
  int first;
  int last;  // below `first`: there are none

  template <class Traits>
  static __device__ __forceinline__ Parts of(const Params& params, int tile_q) {
    const int first_row = tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, params.seq_q) - 1;
    const int first_key = params.score.first_key(first_row);
    const int end_key = params.score.end_key(last_row, params.seq_k);
    if (first_key >= end_key) return {0, -1};
    return {first_key / Traits::kTileK, (end_key - 1) / Traits::kTileK};
  }
};

// The steps of an item: query tiles from the last to the first, of each the query heads of the KV
// head one after another. Under a causal mask the longest items come first, and all begin with the
// same query tile; a short item has its turns as early as its longer neighbours have theirs for the
// same queries. Head by head, it would wait in each head until they are through with the one
// before.
struct Steps {
  int left;  // with this one
  int tile_q;
  int head = 0;  // of the KV head's query heads

  __device__ __forceinline__ explicit Steps(const Item& item, int heads_per_kv)
      : left((item.end - item.begin) * heads_per_kv), tile_q(item.end - 1) {}
  __device__ __forceinline__ void advance(int heads_per_kv) {
    --left;
    if (++head == heads_per_kv) {
      head = 0;
      --tile_q;
    }
  }
};

}  // namespace flashmoe::sm90_backward
