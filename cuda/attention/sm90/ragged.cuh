// Batches of sequences: their tiles, which a separate warp finds ahead of the loads, and which
// block takes which tile (ragged_order.h).
//
// The host knows neither the lengths nor the number of tiles. So the second warp of the producer's
// warpgroup reads the tables, a chunk of sequences at a time, and puts this block's tiles into a
// ring in shared memory. A slot is free when the consumers have finished its tile.
#pragma once

#include <type_traits>

#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90/kv_block_alignment.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/ragged_order.h"
#include "cuda/attention/sm90/steps.cuh"
#include "cuda/attention/sm90/traits.cuh"
#include "cuda/ptx/claim.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90 {

// A query tile, like Tile, with its sequence.
struct alignas(16) RaggedTile {
  int batch;  // row of the batch with its queries
  int head;   // counted as in RaggedParams
  int head_kv;
  int first_row;
  float sink;
  RowState begin;
  int kv_block_alignment;
  Sequence sequence;
  int batch_k;    // row of the batch with its keys; of paged keys, row of the table
  int first_key;  // of its steps, as in Steps
  int end_key;
  int misses_pages;  // some key is on an invalid page; the loading warp sets it
};

static_assert(sizeof(RaggedTile) == kRaggedTileBytes);

// A sequence of a chunk.
struct alignas(16) ChunkSequence {
  Sequence sequence;
  int batch_q;
  int batch_k;
  int tiles;  // per head
};

static_assert(sizeof(ChunkSequence) == kChunkSequenceBytes);

// A chunk in the lanes of a warp (tile_at).
struct WarpLanes {
  TilesOfSequence own;

  __device__ __forceinline__ int top() const { return __reduce_max_sync(kFullWarp, own.top); }

  template <class Count>
  __device__ __forceinline__ int sum(const Count& count) const {
    return __reduce_add_sync(kFullWarp, count(own));
  }

  template <class Count, class Above>
  __device__ __forceinline__ TileOfChunk find(int place, const Count& count,
                                              const Above& above) const {
    const int lane = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
    const int counted = count(own);
    int end = counted;
#pragma unroll
    for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end, distance);
      if (lane >= distance) end += before;
    }
    const int found = __ffs(static_cast<int>(__ballot_sync(kFullWarp, end > place))) - 1;
    return {found, place + __shfl_sync(kFullWarp, above(own) - (end - counted), found)};
  }
};

// The position of a tile's row in the tensors.
struct PlaceOfRow {
  int head;
  int position;

  static __device__ __forceinline__ PlaceOfRow of(const RaggedParams& params,
                                                  const RaggedTile& tile, int row) {
    if (params.heads_per_tile > 1) {
      return {tile.head * params.heads_per_tile + row, tile.sequence.begin_q};
    }
    return {tile.head, tile.sequence.begin_q + row};
  }
  __device__ __forceinline__ int64_t offset(const RowStrides& strides, int batch) const {
    return batch * strides.batch + head * strides.head + position * strides.seq;
  }
};

// How a block gets its tiles. They are dealt; or, beside decoding, a block takes one each time it
// is free; or it finds the taken ones again.
enum class Tiles { kDealt, kTaken, kTakenBefore };

// The tiles of this block, one after another. A warp with its own memory for a chunk finds them.
//
// The groups of 64 rows of a tile follow one another in a head. If kernels pack heads (pack_gqa),
// they follow one another across the query heads of a KV head, the last rows of all heads first.
// The groups of a tile then see about the same keys, and only a sequence's last tile has groups
// without rows.
template <class Traits, Tiles kTiles>
class RaggedScheduler {
 public:
  __device__ __forceinline__ RaggedScheduler(const RaggedParams& params, ChunkSequence* chunk)
      : params_(params), chunk_(chunk), tiles_(first_tiles()) {}

  // Returns false when there are no more. All lanes get the result.
  __device__ __forceinline__ bool next() {
    if constexpr (kTiles == Tiles::kDealt) {
      while (!tiles_.next(lanes_, by_level(), heads(), blocks(), &found_, &head_)) {
        if (!next_chunk()) return false;
      }
    } else {
      const int number = next_number();
      if (number < 0) return false;
      while (tiles_.passes(number)) {
        if (!next_chunk()) return false;
      }
      tiles_.at(lanes_, by_level(), number, &found_, &head_);
    }
    return true;
  }

  // Describes what next() found, as the tile of a group. It works piece by piece: the scheduling
  // warp has few registers, and each piece reads again what the previous one has read.
  __device__ __forceinline__ void describe(RaggedTile* tile, int group) const {
    const ChunkSequence& of = chunk_[found_.lane];
    const Sequence& sequence = of.sequence;
    tile->batch = of.batch_q;
    tile->batch_k = of.batch_k;
    tile->misses_pages = 0;
    tile->sequence = sequence;
    tile->head_kv = Traits::kPacksHeads ? head_ : params_.by_heads_per_kv.quotient(head_);
    const GroupOfTile own = group_of_tile(of, group);
    tile->head = own.head;
    tile->first_row = own.first_row - group * queries_per_group();
    const float sink = sink_of<typename Traits::Element>(params_.score, own.head);
    tile->sink = sink;
    tile->begin = state_of_sink(sink);
    end_piece();
    const RowRange rows = rows_of_tile(of);
    // A single step separates no ends of rows, and begins with key 0: it may hold both ends of the
    // keys, but a ragged map clips only one. A bound that hides no key counts as none, as in dense
    // batches.
    const int right_offset = params_.score.right_offset + sequence.diagonal;
    int alignment = 0;
    if constexpr (Traits::kPacked) {
      alignment = alignment_of_packed(sequence, rows, right_offset);
    } else if (sequence.length_k > Traits::kStepKeys) {
      alignment = kv_block_alignment(Traits::kStepKeys, rows.first, rows.count,
                                     right_offset < sequence.length_k - 1, right_offset);
    }
    tile->kv_block_alignment = alignment;
    const Steps<Traits> steps(params_.score, sequence, rows.first, rows.count, alignment);
    tile->first_key = steps.first;
    tile->end_key = steps.end;
    end_piece();
  }

 private:
  static __device__ __forceinline__ int blocks() { return static_cast<int>(gridDim.x); }

  // Heads with tiles of their own, and the groups that tiles hold per level.
  __device__ __forceinline__ int heads() const {
    return Traits::kPacksHeads ? params_.heads_kv : params_.heads_of_tiles;
  }
  __device__ __forceinline__ int heads_per_kv() const {
    return Traits::kPacksHeads ? 1 : params_.by_heads_per_kv.number();
  }
  __device__ __forceinline__ GroupsOfLevel by_level() const {
    if constexpr (Traits::kPacked) return {0, 1, 1};  // tiles of few queries see about as many keys
    constexpr int kOfTile = Traits::kPacksHeads ? Traits::kConsumers : 1;
    const int of_level = Traits::kPacksHeads ? params_.by_heads_per_kv.number() : 1;
    return {params_.grows != 0 ? of_level : 0, kOfTile, params_.most_levels};
  }

  static __device__ __forceinline__ void end_piece() { asm volatile("" ::: "memory"); }

  struct RowRange {
    int first;
    int count;
  };
  struct GroupOfTile {
    int first_row;
    int head;
  };

  // The last level of a sequence's rows, in groups.
  static __device__ __forceinline__ int last_level(const ChunkSequence& of) {
    return ceil_div<kRowsPerGroup>(of.sequence.length_q) - 1;
  }
  // The number of a packed tile's group among those of the KV head.
  __device__ __forceinline__ int number_of(int group) const {
    return found_.rank * Traits::kConsumers + group;
  }

  // Rows of a head in a group.
  __device__ __forceinline__ int queries_per_group() const {
    if constexpr (Traits::kPacked) {
      return params_.queries_per_group;
    } else {
      return kRowsPerGroup;
    }
  }

  // All rows of the tile, those of one head if they are packed.
  __device__ __forceinline__ RowRange rows_of_tile(const ChunkSequence& of) const {
    if constexpr (Traits::kPacked) {
      const int queries = params_.by_queries_per_tile.number();
      return {(of.tiles - 1 - found_.rank) * queries, queries};
    } else if constexpr (Traits::kPacksHeads) {
      const Divisor& by_heads = params_.by_heads_per_kv;
      const int last = last_level(of);
      const int end = min(by_heads.quotient(number_of(Traits::kConsumers - 1)), last);
      const int levels = end - by_heads.quotient(number_of(0)) + 1;
      return {(last - end) * kRowsPerGroup, levels * kRowsPerGroup};
    }
    // As in dense batches: if later tiles are longer, the first one lacks rows.
    const int spare = params_.grows != 0 ? of.tiles * Traits::kTileQ - of.sequence.length_q : 0;
    return {(of.tiles - 1 - found_.rank) * Traits::kTileQ - spare / kRowsPerGroup * kRowsPerGroup,
            Traits::kTileQ};
  }

  // kv_block_alignment of a packed tile. Its queries are few, so that steps rarely separate the
  // ends of their keys. Unless they do, steps begin where pages of so many keys do: a step that
  // begins elsewhere comes in more boxes than the copy engine issues in time.
  __device__ __forceinline__ int alignment_of_packed(const Sequence& sequence, const RowRange& rows,
                                                     int right_offset) const {
    constexpr int kKeys = Traits::kStepKeys;
    const int last = min(rows.first + rows.count, sequence.length_q) - 1;
    const int first_end = right_offset + rows.first + 1;
    const int last_end = min(right_offset + last + 1, sequence.length_k);
    const bool separates = first_end > 0 && (first_end - 1) / kKeys != (last_end - 1) / kKeys;
    return separates && first_end < last_end && sequence.length_k > kKeys ? kKeys / 2 : 0;
  }

  // A missing group begins behind the rows.
  __device__ __forceinline__ GroupOfTile group_of_tile(const ChunkSequence& of, int group) const {
    if constexpr (Traits::kPacksHeads) {
      const int heads = params_.by_heads_per_kv.number();
      const int level = params_.by_heads_per_kv.quotient(number_of(group));
      const int levels = last_level(of) - level;  // levels after it
      const int head = levels < 0 ? 0 : number_of(group) - level * heads;
      return {(levels < 0 ? last_level(of) + 1 : levels) * kRowsPerGroup, head_ * heads + head};
    }
    const int first_row = rows_of_tile(of).first + group * queries_per_group();
    if constexpr (Traits::kPacked) {
      return {first_row, head_ * params_.packed_heads};
    } else {
      return {first_row, head_};
    }
  }

  using Walk = std::conditional_t<kTiles == Tiles::kDealt, TilesOfChunks, TilesInTurn>;

  static __device__ __forceinline__ Walk first_tiles() {
    if constexpr (kTiles == Tiles::kDealt) {
      return Walk(static_cast<int>(blockIdx.x));
    } else {
      return Walk();
    }
  }

  // The number of the next tile that is taken, or was taken. Below 0: the block recorded no more.
  __device__ __forceinline__ int next_number() {
    int number = -1;
    if (threadIdx.x % kThreadsPerWarp == 0) {
      // If offsets overlap, there may be more tiles than rows.
      const bool kept = link_ < params_.chains_room;
      if (kTiles == Tiles::kTaken) {
        // The data that this kernel reads was written before decoding let it begin, and is read
        // after this claim.
        number = static_cast<int>(ptx::claim_acquire(&params_.division->next_tile));
        if (kept) params_.chains[link_] = number;
      } else if (kept) {
        number = params_.chains[link_];
      }
    }
    number = __shfl_sync(kFullWarp, number, 0);
    link_ = blocks() + number;
    return number;
  }

  __device__ __forceinline__ bool next_chunk() {
    constexpr int kMostKeys = (1 << 30) / kSequencesPerChunk;  // so that their sum fits
    if (first_ >= params_.sequences.count) return false;
    const int lane = reread::lane_index();
    ChunkSequence own = {};
    if (first_ + lane < params_.sequences.count) own = read(first_ + lane);
    first_ += kSequencesPerChunk;
    __syncwarp();  // the previous chunk has been read
    chunk_[lane] = own;
    __syncwarp();
    constexpr int kRowsOfLevel =
        Traits::kPacksHeads || Traits::kPacked ? kRowsPerGroup : Traits::kTileQ;
    const int levels = Traits::kPacked ? 1 : ceil_div<kRowsOfLevel>(own.sequence.length_q);
    lanes_.own = TilesOfSequence::of(
        own.tiles, levels, keys_of_longest(own, (levels - 1) * kRowsOfLevel), kRowsOfLevel);
    const int keys =
        __reduce_add_sync(kFullWarp, own.tiles > 0 ? min(own.sequence.length_k, kMostKeys) : 0);
    const int tiles = __reduce_add_sync(kFullWarp, own.tiles);
    const int of_swizzle = heads_per_swizzle(params_.heads_kv, tiles * heads_per_kv(),
                                             params_.tiles_of_swizzle, keys, params_.keys_of_l2) *
                           heads_per_kv();
    if constexpr (kTiles == Tiles::kDealt) {
      tiles_.begin_chunk(lanes_, tiles, of_swizzle);
    } else {
      tiles_.begin_chunk(tiles, heads(), of_swizzle);
    }
    return true;
  }

  __device__ __forceinline__ ChunkSequence read(int number) const {
    const SequenceParams& sequences = params_.sequences;
    const SequenceRows queries = sequences.queries_of(number);
    const SequenceRows keys = sequences.keys_of(number);
    // Rows that are heads all see what the one query sees: their later diagonals hide no more.
    const int rows = queries.length * params_.heads_per_tile;
    const Sequence sequence = {queries.begin, keys.begin, rows, keys.length,
                               sequences.diagonal_of(number, queries.length, keys.length)};
    if constexpr (Traits::kPacked) {
      const Divisor& by_tiles = params_.by_queries_per_tile;
      return {sequence, queries.batch, keys.batch, by_tiles.quotient(rows + by_tiles.number() - 1)};
    }
    return {sequence, queries.batch, keys.batch,
            Traits::kPacksHeads ? ceil_div<Traits::kConsumers>(ceil_div<kRowsPerGroup>(rows) *
                                                               params_.by_heads_per_kv.number())
                                : ceil_div<Traits::kTileQ>(rows)};
  }

  // Keys that the rows from `first_row` on see.
  __device__ __forceinline__ int keys_of_longest(const ChunkSequence& of, int first_row) const {
    if (of.tiles == 0) return 0;
    return max(0, of.sequence.end_key(params_.score, of.sequence.length_q - 1) -
                      of.sequence.first_key(params_.score, first_row));
  }

  const RaggedParams& params_;
  ChunkSequence* chunk_;
  Walk tiles_;
  WarpLanes lanes_ = {};
  TileOfChunk found_ = {};
  int head_ = 0;
  int first_ = 0;                            // first sequence of the next chunk
  int link_ = static_cast<int>(blockIdx.x);  // in the chains: where the next tile's number is
};

}  // namespace flashmoe::sm90
