// Tiles of query rows, the steps of keys that they need, and which block takes which tile.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/kv_block_alignment.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/ragged.cuh"
#include "cuda/attention/sm90/steps.cuh"
#include "cuda/attention/sm90/traits.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe::sm90 {

inline constexpr int kNoTile = -(1 << 30);

// A query tile. The producer decodes it and puts it into shared memory with its Q, together with
// the initial state of its rows: so neither a sink nor its absence costs the consumers
// instructions. Tiles of unequal length come longest first, within groups of heads whose keys and
// values fit the L2 together (L2 swizzle).
struct alignas(16) Tile {
  int batch;
  int head;
  int head_kv;
  int first_row;  // groups before row 0 do not exist; kNoTile: no more tiles
  float sink;
  RowState begin;  // state of each row at the beginning: the sink's

  template <class Traits>
  static __device__ __forceinline__ Tile at(const TileParams& params, int position) {
    const auto [head, rank] = tile_in_swizzle(params, position);
    Tile result;
    result.batch = params.by_heads_q.quotient(head);
    result.head = head - result.batch * params.heads_q;
    result.head_kv = params.by_heads_per_kv.quotient(result.head);
    result.first_row = params.first_row + tile_of_rank(params, rank) * Traits::kTileQ;
    result.sink = sink_of<typename Traits::Element>(params.score, result.head);
    result.begin = state_of_sink(result.sink);
    return result;
  }
};

static_assert(sizeof(Tile) == kTileBytes);

// kv_block_alignment of a tile of `rows` queries.
template <class Traits>
__device__ __forceinline__ int kv_block_alignment(const Params& params, const Sequence& sequence,
                                                  int first_row, int rows) {
  constexpr int kKeys = Traits::kStepKeys;
  constexpr bool kWholeGroups = kKeys % kRowsPerGroup == 0;
  if constexpr (kWholeGroups && !Traits::kSplit) return params.kv_block_alignment;
  static_assert(kWholeGroups ||
                (kKeys > kRowsPerGroup && Traits::kConsumers == 2 && !Traits::kSplit));
  return kv_block_alignment(kKeys, first_row, rows, params.score.bounded_right != 0,
                            params.score.right_offset + sequence.diagonal);
}

// The tiles of this block, one after another.
template <class Traits>
class TileScheduler {
 public:
  explicit __device__ __forceinline__ TileScheduler(const TileParams& params) : params_(params) {}

  // Returns false when there are no more.
  __device__ __forceinline__ bool next(Tile* tile) {
    return rounds_.next(params_,
                        [&](int position) { *tile = Tile::at<Traits>(params_, position); });
  }

 private:
  const TileParams& params_;
  SwizzledRounds rounds_;
};

// ---- tiles of a kernel whose keys are split
// ---------------------------------------------------------

inline constexpr int kWholeTile = -1;

// A tile or a part of one, with the steps that its block takes, as in Steps: from the last to the
// first, or none.
struct alignas(16) TilePart {
  int batch;
  int head;  // the first of the KV head's query heads
  int head_kv;
  int first_row;  // query; kNoTile: no more tiles
  int first_key;
  int end_key;
  int place;  // in the workspace, in parts; kWholeTile: the only part

  // The whole tile. Tiles of a head are consecutive, because they read the same keys.
  template <class Traits>
  static __device__ __forceinline__ TilePart at(const SplitParams& params, int position) {
    const auto [head, rank] =
        tile_in_order(params.by_tiles_per_head, params.tiles_per_head, position);
    const int tile = tile_of_rank(params, rank);
    const int queries = params.groups_per_tile * params.queries_per_group;
    const int head_kv = params.by_chunks.quotient(head);
    TilePart result;
    result.batch = params.by_heads_kv.quotient(head_kv);
    result.head_kv = head_kv - result.batch * params.heads_kv;
    result.head = (head - head_kv * params.chunks) * params.packed_heads;
    result.first_row = tile * queries;
    const Sequence sequence = sequence_of(params, result.batch);
    const int shift = kv_block_alignment<Traits>(params, sequence, result.first_row, queries);
    const Steps<Traits> steps(params.score, sequence, result.first_row, queries, shift);
    result.first_key = steps.first;
    result.end_key = steps.end;
    result.place = kWholeTile;
    return result;
  }
};

static_assert(sizeof(TilePart) == kTileBytes);

// A row of a warpgroup whose rows are those of all query heads of a KV head.
struct PackedRow {
  int query;
  int head;
  bool exists;

  static __device__ __forceinline__ PackedRow of(const RaggedParams& params, const RaggedTile& tile,
                                                 int group, int row) {
    const int first_query = tile.first_row + group * params.queries_per_group;
    const int query = row * params.packed_heads_reciprocal >> 16;
    return {first_query + query, tile.head + row - query * params.packed_heads,
            query < params.queries_per_group && first_query + query < tile.sequence.length_q};
  }

  static __device__ __forceinline__ PackedRow of(const SplitParams& params, const TilePart& tile,
                                                 int group, int row) {
    const int first_query = tile.first_row + group * params.queries_per_group;
    PackedRow result;
    result.query = first_query + (row * params.packed_heads_reciprocal >> 16);
    const int head = tile.head + row - (result.query - first_query) * params.packed_heads;
    result.head = tile.head_kv * params.heads_per_kv + head;
    result.exists =
        group < params.groups_per_tile && result.query < sequence_of(params, tile.batch).length_q &&
        result.query - first_query < params.queries_per_group && head < params.heads_per_kv;
    return result;
  }
};

// The work of this block: its range of steps, or whole tiles in rounds.
template <class Traits>
class SplitTileScheduler {
 public:
  explicit __device__ __forceinline__ SplitTileScheduler(const SplitParams& params)
      : params_(params) {
    if (params.stream_k_blocks == 0) return;
    tiles_.begin(params.starts[blockIdx.x]);
  }

  // Returns false when there are no more.
  __device__ __forceinline__ bool next(TilePart* part) {
    return params_.stream_k_blocks > 0 ? next_of_stream_k(part) : next_of_rounds(part);
  }

 private:
  __device__ __forceinline__ bool next_of_stream_k(TilePart* part) {
    const StreamKStart& end = params_.starts[blockIdx.x + 1];
    return tiles_.next_of_range(end, [&](int position, int first_step, bool cut) {
      *part = TilePart::at<Traits>(params_, position);
      if (cut) {
        part->end_key = part->first_key + end.step * Traits::kStepKeys;
        part->place = end.place - 1;
      }
      if (first_step > 0) {
        part->first_key += first_step * Traits::kStepKeys;
        part->place = params_.starts[blockIdx.x].place;
      }
    });
  }

  __device__ __forceinline__ bool next_of_rounds(TilePart* part) {
    return tiles_.next_of_rounds(params_.tiles_per_head * params_.heads, [&](int position) {
      *part = TilePart::at<Traits>(params_, position);
    });
  }

  const SplitParams& params_;
  StreamK tiles_;
};

// ---- either
// -----------------------------------------------------------------------------------------

// Selects a type by the kind of batch: sequences, split keys, or neither.
template <class Traits, class Ragged, class Split, class Whole>
using ByBatch =
    std::conditional_t<Traits::kRagged, Ragged, std::conditional_t<Traits::kSplit, Split, Whole>>;

template <class Traits>
using ParamsOf = ByBatch<Traits, RaggedParams, SplitParams, TileParams>;
template <class Traits>
using TileOf = ByBatch<Traits, RaggedTile, TilePart, Tile>;
template <class Traits>
using SchedulerOf = ByBatch<Traits, RaggedScheduler<Traits, Tiles::kDealt>,
                            SplitTileScheduler<Traits>, TileScheduler<Traits>>;

// Data in shared memory is read at each use.
template <class Traits>
using SequenceOf = std::conditional_t<Traits::kRagged, const Sequence&, Sequence>;

template <class Traits>
__device__ __forceinline__ SequenceOf<Traits> sequence_of_tile(const ParamsOf<Traits>& params,
                                                               const TileOf<Traits>& tile) {
  if constexpr (Traits::kRagged) {
    return tile.sequence;
  } else {
    return sequence_of(params, tile.batch);
  }
}

// Whether some query of the tile's sequence does not see every key, like set_bounds in the core for
// a dense batch.
template <class Traits>
__device__ __forceinline__ bool is_masked(const ParamsOf<Traits>& params,
                                          const TileOf<Traits>& tile) {
  if constexpr (Traits::kRagged) {
    const Sequence& sequence = tile.sequence;
    return params.score.right_offset + sequence.diagonal < sequence.length_k - 1 ||
           params.score.left_offset + sequence.diagonal > 1 - sequence.length_q;
  } else {
    return params.score.masked != 0;
  }
}

// Queries of a warpgroup. Unless they are packed, all of its rows are of one head.
template <class Traits>
__device__ __forceinline__ int queries_per_group(const ParamsOf<Traits>& params) {
  if constexpr (Traits::kPacked) {
    return params.queries_per_group;
  } else {
    return kRowsPerGroup;
  }
}

// The query of a row of a warpgroup whose first query is `first_query`.
template <class Traits>
__device__ __forceinline__ int query_of(const ParamsOf<Traits>& params, int first_query, int row) {
  if constexpr (Traits::kPacked) {
    return first_query + (row * params.packed_heads_reciprocal >> 16);
  } else {
    return first_query + row;
  }
}

// `first_row` is the tile's.
template <class Traits>
__device__ __forceinline__ int kv_block_alignment_of_tile(const ParamsOf<Traits>& params,
                                                          const TileOf<Traits>& tile,
                                                          int first_row) {
  if constexpr (Traits::kRagged) {
    return tile.kv_block_alignment;
  } else {
    const Sequence sequence = sequence_of_tile<Traits>(params, tile);
    if constexpr (Traits::kSplit) {
      return kv_block_alignment<Traits>(params, sequence, first_row,
                                        params.groups_per_tile * params.queries_per_group);
    } else {
      return kv_block_alignment<Traits>(params, sequence, first_row, Traits::kTileQ);
    }
  }
}

template <class Traits>
__device__ __forceinline__ Steps<Traits> steps_of_tile(const ParamsOf<Traits>& params,
                                                       const TileOf<Traits>& tile) {
  if constexpr (Traits::kSplit || Traits::kRagged) {
    return {tile.first_key, tile.end_key};
  } else {
    return {params.score, sequence_of_tile<Traits>(params, tile), tile.first_row, Traits::kTileQ,
            kv_block_alignment_of_tile<Traits>(params, tile, tile.first_row)};
  }
}

}  // namespace flashmoe::sm90
