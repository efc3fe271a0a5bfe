// The steps of an item.
#pragma once

#include "cuda/attention/backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::Item;
using attention_backward::kNoItem;
using attention_backward::Parts;
static_assert(sizeof(Item) == kItemBytes);

// Query tiles from the last to the first, of each the query heads of the KV head one after another.
// Under a causal mask the longest items come first, and all begin with the same query tile; a short
// item has its turns as early as its longer neighbours have theirs for the same queries. Head by
// head, it would wait in each head until they are through with the one before.
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
