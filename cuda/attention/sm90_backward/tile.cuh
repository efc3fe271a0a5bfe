// Items, their steps, and where their rows lie. The order of items is in
// cuda/attention/backward/tile.cuh.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::CommonParams;
using attention_backward::Item;
using attention_backward::kNoItem;
using attention_backward::kWhole;
using attention_backward::Parts;
using attention_backward::runs_down;

template <class Traits>
using ItemFor = std::conditional_t<Traits::kRagged, attention_backward::RaggedItem, Item>;

// Returns the number of an item's tile of keys among all tiles. For sequences that is the item's
// ticket, which the producer leaves in a gap of the item.
template <class AnyItem>
__device__ __forceinline__ int number_of(const attention_backward::CommonParams& params,
                                         const AnyItem& item) {
  if constexpr (AnyItem::kRagged) {
    return item.gaps[0];
  } else {
    return (item.batch * params.heads_kv + item.head_kv) * params.tiles_k + item.tile;
  }
}

// Warps of a place mark its rows (Withheld in params.h). A place is 64 queries of a tile of dQ, or
// 64 keys of a tile of keys. The functions return the marks of the part of its columns that begins
// with `first_column`.
inline constexpr int kWarpsOfPlace = 4;
template <class Traits>
__device__ __forceinline__ uint2* marks_of_dq(const Withheld& withheld, uint32_t tile, int group,
                                              int first_column) {
  if (withheld.dq == nullptr) return nullptr;
  const int64_t place = int64_t{tile} * (Traits::kTileQ / kKeysPerGroup) + group;
  return withheld.dq +
         (place * Traits::kDqParts + first_column / Traits::kDqPartColumns) * kWarpsOfPlace;
}
template <class Traits>
__device__ __forceinline__ uint2* marks_of_keys(uint2* marks, int tile, int group,
                                                int first_column) {
  const int64_t place = int64_t{tile} * (Traits::kTileK / kKeysPerGroup) + group;
  return marks +
         (place * Traits::kKeyParts + first_column / Traits::kKeyPartColumns) * kWarpsOfPlace;
}

// The steps of an item: its query tiles, and for each of these the query heads of the KV head one
// after another. If steps went head by head, a short item that ascends would wait in each head for
// its longer neighbours, which reach the same queries no later than it does.
struct Steps {
  int left;  // including this one
  int tile_q;
  int head = 0;  // among the KV head's query heads

  template <class AnyItem>
  __device__ __forceinline__ explicit Steps(const AnyItem& item, int heads_per_kv)
      : left((item.end - item.begin) * heads_per_kv),
        tile_q(attention_backward::runs_down(item) ? item.end - 1 : item.begin) {}
  __device__ __forceinline__ void advance(bool down, int heads_per_kv) {
    --left;
    if (++head == heads_per_kv) {
      head = 0;
      tile_q += down ? -1 : 1;
    }
  }
};

// Returns the coordinates of a box of rows in a ragged map. The box begins with row `row` of a
// sequence. The sequence has `length` rows, and its first row is the tensor's row `begin`.
__device__ __forceinline__ RaggedRow row_of_sequence(int row, int batch, int rows_per_batch,
                                                     int begin, int length) {
  return RaggedRow::at(row, batch * rows_per_batch + begin, length);
}

}  // namespace flashmoe::sm90_backward
