// Tiles of query rows, the steps of keys that they need, and who takes which.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/step_shift.h"
#include "cuda/attention/sm90/traits.cuh"

namespace flashmoe::sm90 {

inline constexpr int kNoTile = -(1 << 30);

// A query tile. The producer works it out and leaves it in shared memory with its Q. Tiles of unequal
// length come longest first, inside sections of heads whose keys and values fit the L2 together.
struct alignas(16) Tile {
  int batch;
  int head;
  int head_kv;
  int first_row;  // groups before row 0 do not exist; kNoTile: there are no more

  template <class Traits>
  static __device__ __forceinline__ Tile at(const TileParams& params, int position) {
    const int section = params.by_tiles_per_section.quotient(position);
    const int rank = position - section * params.by_tiles_per_section.number();
    const int first_head = section * params.heads_per_section;
    const bool last = params.heads - first_head <= params.heads_per_section;
    const Divisor& heads = last ? params.by_heads_of_last_section : params.by_heads_per_section;
    const int tile = heads.quotient(rank);
    const int head = first_head + rank - tile * heads.number();
    Tile result;
    result.batch = params.by_heads_q.quotient(head);
    result.head = head - result.batch * params.heads_q;
    result.head_kv = params.by_heads_per_kv.quotient(result.head);
    const int tile_of_head = params.last_tiles_first ? params.tiles_per_head - 1 - tile : tile;
    result.first_row = params.first_row + tile_of_head * Traits::kTileQ;
    return result;
  }
};

static_assert(sizeof(Tile) == kTileInfoBytes);

// Query row `row` sees the keys from first_key to before end_key, none if that is not behind. Neither
// decreases with the row.
__device__ __forceinline__ int first_key(const Params& params, int row) {
  return max(0, row + params.left_offset);
}
__device__ __forceinline__ int end_key(const Params& params, int row) {
  return max(0, min(params.seq_k, row + params.right_offset + 1));
}

// step_shift of a tile of so many queries.
template <class Traits>
__device__ __forceinline__ int step_shift(const Params& params, int first_row, int rows) {
  constexpr int kKeys = Traits::kStepKeys;
  constexpr bool kWholeGroups = kKeys % kRowsPerGroup == 0;
  if constexpr (kWholeGroups && !Traits::kSplit) return params.step_shift;
  static_assert(kWholeGroups ||
                (kKeys > kRowsPerGroup && Traits::kConsumers == 2 && !Traits::kSplit));
  return step_shift(kKeys, first_row, rows, params.bounded_right != 0, params.right_offset);
}

// The steps that some rows need, by their keys: from the first step's first one to behind the last one's last.
// Both 0 where there are no such rows, or where they see no key.
template <class Traits>
struct Steps {
  int first;  // may be below 0, where there are no keys
  int end;

  __device__ __forceinline__ Steps(int first_, int end_) : first(first_), end(end_) {}
  __device__ __forceinline__ Steps(const Params& params, int first_row, int rows, int shift) {
    constexpr int kKeys = Traits::kStepKeys;
    const int last_row = min(first_row + rows, params.seq_q) - 1;
    const int begin = sm90::first_key(params, max(first_row, 0));
    const int behind = last_row < max(first_row, 0) ? 0 : sm90::end_key(params, last_row);
    const bool any = begin < behind;
    first = any ? (begin + shift) / kKeys * kKeys - shift : 0;
    end = any ? (behind + shift + kKeys - 1) / kKeys * kKeys - shift : 0;
  }
};

// The tiles of this block, one after another. Blocks take tiles in rounds, and every other round runs
// backwards: whoever had the longest tile of one has the shortest of the next. Where they differ that
// begins anew with each section, whose tiles get shorter and shorter.
template <class Traits>
class TileWalk {
 public:
  explicit __device__ __forceinline__ TileWalk(const TileParams& params) : params_(params) {}

  // False when there are no more.
  __device__ __forceinline__ bool next(Tile* tile) {
    const int blocks = static_cast<int>(gridDim.x);
    const int tiles = params_.tiles_per_head * params_.heads;
    const int section = params_.last_tiles_first ? params_.by_tiles_per_section.number() : tiles;
    while (first_ < tiles) {
      const int end = min(first_ + section, tiles);
      while (round_ < end) {
        const int position = round_ + (forwards_ ? turn_ : blocks - 1 - turn_);
        round_ += blocks;
        forwards_ = !forwards_;
        if (position < end) {
          *tile = Tile::at<Traits>(params_, position);
          return true;
        }
      }
      first_ += section;
      round_ = first_;
      forwards_ = true;
      // Behind the block that had this one's end: sections may hold fewer tiles than there are blocks.
      turn_ -= params_.turns_per_section;
      if (turn_ < 0) turn_ += blocks;
    }
    return false;
  }

 private:
  const TileParams& params_;
  int turn_ = static_cast<int>(blockIdx.x);  // of this block in a round of the section
  int first_ = 0;                            // position of the section
  int round_ = 0;                            // position of the round
  bool forwards_ = true;
};

// ---- tiles of a kernel whose keys are split ---------------------------------------------------------

inline constexpr int kWholeTile = -1;

// A tile or a part of one, with the steps that its block takes, as in Steps: from the last to the first, or
// none.
struct alignas(16) TilePart {
  int batch;
  int head;  // of the KV head's query heads the first
  int head_kv;
  int first_row;  // query; kNoTile: there are no more
  int first_key;
  int end_key;
  int place;  // in the workspace, in parts; kWholeTile: there are no others

  // The whole tile. Those of a head come together, as they read the same keys.
  template <class Traits>
  static __device__ __forceinline__ TilePart at(const SplitParams& params, int position) {
    const int head = params.by_tiles_per_head.quotient(position);
    const int rank = position - head * params.tiles_per_head;
    const int tile = params.last_tiles_first ? params.tiles_per_head - 1 - rank : rank;
    const int queries = params.groups_per_tile * params.queries_per_group;
    const int head_kv = params.by_chunks.quotient(head);
    TilePart result;
    result.batch = params.by_heads_kv.quotient(head_kv);
    result.head_kv = head_kv - result.batch * params.heads_kv;
    result.head = (head - head_kv * params.chunks) * params.packed_heads;
    result.first_row = tile * queries;
    const int shift = step_shift<Traits>(params, result.first_row, queries);
    const Steps<Traits> steps(params, result.first_row, queries, shift);
    result.first_key = steps.first;
    result.end_key = steps.end;
    result.place = kWholeTile;
    return result;
  }
};

static_assert(sizeof(TilePart) == kTilePartBytes);

// A row of a warpgroup of such a tile.
struct PackedRow {
  int query;
  int head;
  bool exists;

  static __device__ __forceinline__ PackedRow of(const SplitParams& params, const TilePart& tile,
                                                 int group, int row) {
    const int first_query = tile.first_row + group * params.queries_per_group;
    PackedRow result;
    result.query = first_query + (row * params.packed_heads_reciprocal >> 16);
    const int head = tile.head + row - (result.query - first_query) * params.packed_heads;
    result.head = tile.head_kv * params.heads_per_kv + head;
    result.exists = group < params.groups_per_tile && result.query < params.seq_q &&
                    result.query - first_query < params.queries_per_group &&
                    head < params.heads_per_kv;
    return result;
  }
};

// What this block takes: its share, or whole tiles in rounds, every other one backwards.
template <class Traits>
class PartWalk {
 public:
  explicit __device__ __forceinline__ PartWalk(const SplitParams& params) : params_(params) {
    if (params.shares == 0) return;
    const ShareStart& start = params.starts[blockIdx.x];
    next_ = start.tile;
    first_step_ = start.step;
  }

  // False when there are no more.
  __device__ __forceinline__ bool next(TilePart* part) {
    return params_.shares > 0 ? next_of_share(part) : next_of_rounds(part);
  }

 private:
  __device__ __forceinline__ bool next_of_share(TilePart* part) {
    const ShareStart& end = params_.starts[blockIdx.x + 1];
    const bool cut = next_ == end.tile;  // the next block has the rest
    if (next_ > end.tile || (cut && first_step_ >= end.step)) return false;
    *part = TilePart::at<Traits>(params_, next_);
    if (cut) {
      part->end_key = part->first_key + end.step * Traits::kStepKeys;
      part->place = end.place - 1;
    }
    if (first_step_ > 0) {
      part->first_key += first_step_ * Traits::kStepKeys;
      part->place = params_.starts[blockIdx.x].place;
    }
    ++next_;
    first_step_ = 0;
    return true;
  }

  __device__ __forceinline__ bool next_of_rounds(TilePart* part) {
    const int blocks = static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x);
    const int position = next_ + (forwards_ ? block : blocks - 1 - block);
    if (position >= params_.tiles_per_head * params_.heads) return false;
    next_ += blocks;
    forwards_ = !forwards_;
    *part = TilePart::at<Traits>(params_, position);
    return true;
  }

  const SplitParams& params_;
  int next_ = 0;  // tile of the share, or position of the round
  int first_step_ = 0;
  bool forwards_ = true;
};

// ---- either -----------------------------------------------------------------------------------------

template <class Traits>
using ParamsOf = std::conditional_t<Traits::kSplit, SplitParams, TileParams>;
template <class Traits>
using TileOf = std::conditional_t<Traits::kSplit, TilePart, Tile>;
template <class Traits>
using WalkOf = std::conditional_t<Traits::kSplit, PartWalk<Traits>, TileWalk<Traits>>;

// Queries of a warpgroup, all of whose rows are of one head where keys are not split.
template <class Traits>
__device__ __forceinline__ int queries_per_group(const ParamsOf<Traits>& params) {
  if constexpr (Traits::kSplit) {
    return params.queries_per_group;
  } else {
    return kRowsPerGroup;
  }
}

// The query of a row of a warpgroup, of which the first is `first_query`.
template <class Traits>
__device__ __forceinline__ int query_of(const ParamsOf<Traits>& params, int first_query, int row) {
  if constexpr (Traits::kSplit) {
    return first_query + (row * params.packed_heads_reciprocal >> 16);
  } else {
    return first_query + row;
  }
}

template <class Traits>
__device__ __forceinline__ int step_shift_of_tile(const ParamsOf<Traits>& params, int first_row) {
  if constexpr (Traits::kSplit) {
    return step_shift<Traits>(params, first_row, params.groups_per_tile * params.queries_per_group);
  } else {
    return step_shift<Traits>(params, first_row, Traits::kTileQ);
  }
}

template <class Traits>
__device__ __forceinline__ Steps<Traits> steps_of_tile(const ParamsOf<Traits>& params,
                                                       const TileOf<Traits>& tile) {
  if constexpr (Traits::kSplit) {
    return {tile.first_key, tile.end_key};
  } else {
    return {params, tile.first_row, Traits::kTileQ,
            step_shift_of_tile<Traits>(params, tile.first_row)};
  }
}

}  // namespace flashmoe::sm90
