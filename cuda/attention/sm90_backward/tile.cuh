// The steps of an item. Its order is in cuda/attention/backward/tile.cuh.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::Item;
using attention_backward::kNoItem;
using attention_backward::kWhole;
using attention_backward::Parts;

template <class Traits>
using ItemFor = std::conditional_t<Traits::kRagged, attention_backward::RaggedItem, Item>;

// The steps of an item: its query tiles, of each the query heads of the KV head one after another.
// Head by head, a short item that ascends would wait in each head for its longer neighbours, which
// reach the same queries no later than it does.
struct Steps {
  int left;  // with this one
  int tile_q;
  int head = 0;  // of the KV head's query heads

  template <class AnyItem>
  __device__ __forceinline__ explicit Steps(const AnyItem& item, int heads_per_kv)
      : left((item.end - item.begin) * heads_per_kv),
        tile_q(item.ascends ? item.end - 1 : item.begin) {}
  __device__ __forceinline__ void advance(bool ascends, int heads_per_kv) {
    --left;
    if (++head == heads_per_kv) {
      head = 0;
      tile_q += ascends ? -1 : 1;
    }
  }
};

}  // namespace flashmoe::sm90_backward
