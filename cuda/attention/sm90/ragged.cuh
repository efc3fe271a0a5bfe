// Batches of sequences: their tiles, which a warp of its own finds ahead of the loads, and who
// takes which (ragged_order.h).
//
// The host knows neither the lengths nor how many tiles there are. So the second warp of the
// producer's warpgroup reads the tables, a chunk of sequences at a time, and leaves this block's
// tiles in a ring of shared memory, whose slots are free when the consumers are past their tiles.
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

// A query tile, as Tile is, with the sequence that it is of.
struct alignas(16) RaggedTile {
  int batch;  // row of the batch that its queries are in
  int head;   // of RaggedParams' heads
  int head_kv;
  int first_row;
  float sink;
  RowState begin;
  int kv_block_alignment;
  Sequence sequence;
  int batch_k;    // row of the batch that its keys are in; of paged ones the table's
  int first_key;  // of its steps, as in Steps
  int end_key;
  int misses_pages;  // a key's page is none: who loads says so
};

static_assert(sizeof(RaggedTile) == kRaggedTileBytes);

// A sequence of a chunk.
struct alignas(16) ChunkSequence {
  Sequence sequence;
  int batch_q;
  int batch_k;
  int tiles;  // of one head
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

// A row of a tile in the tensors.
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

// Which tiles are a block's: those that it is dealt, or, beside decoding, those that it takes, each
// when it is free for it, and may find again.
enum class Tiles { kDealt, kTaken, kTakenBefore };

// The tiles of this block, one after another, found by a warp that has the memory of a chunk for
// itself.
//
// The groups of 64 rows of a tile follow one another in a head. Where the keys of all sequences of
// a chunk are a single step they are rather those of all query heads of a KV head, one head behind
// the other (pack_gqa), if that makes fewer tiles: in those of one head some groups have no rows,
// and a tile takes as long.
template <class Traits, Tiles kTiles>
class RaggedScheduler {
 public:
  __device__ __forceinline__ RaggedScheduler(const RaggedParams& params, ChunkSequence* chunk)
      : params_(params), chunk_(chunk), tiles_(first_tiles()) {}

  // False when there are no more. All lanes come to know which it is.
  __device__ __forceinline__ bool next() {
    if constexpr (kTiles == Tiles::kDealt) {
      while (!tiles_.next(lanes_, grows(), heads(), blocks(), &found_, &head_)) {
        if (!next_chunk()) return false;
      }
    } else {
      const int number = next_number();
      if (number < 0) return false;
      while (tiles_.passes(number)) {
        if (!next_chunk()) return false;
      }
      tiles_.at(lanes_, grows(), number, &found_, &head_);
    }
    return true;
  }

  // Describes what next() found, as the tile that a group is of. Piece by piece: the scheduling
  // warp has few registers.
  __device__ __forceinline__ void describe(RaggedTile* tile, int group) const {
    const ChunkSequence& of = chunk_[found_.lane];
    const Sequence& sequence = of.sequence;
    tile->batch = of.batch_q;
    tile->batch_k = of.batch_k;
    tile->misses_pages = 0;
    tile->sequence = sequence;
    int head = head_;
    int first_row = 0;
    // A single step parts no rows' ends, and begins with key 0: it may hold both ends of the keys,
    // of which a ragged map cuts one.
    int alignment = 0;
    if (Traits::kPacksHeads && packed_) {
      tile->head_kv = head_;
      const int number = found_.rank * Traits::kConsumers + group;
      const int heads = params_.by_heads_per_kv.number();
      const int second = sequence.length_q > kRowsPerGroup ? 1 : 0;  // a head has a second group
      const int head_of_group = number >> second;
      const bool exists = head_of_group < heads;
      head = head_ * heads + (exists ? head_of_group : 0);
      const int row = exists ? (number & second) * kRowsPerGroup : Traits::kStepKeys;
      tile->first_row = row - group * kRowsPerGroup;
    } else {
      tile->head_kv = params_.by_heads_per_kv.quotient(head);
      // As in dense batches: where later tiles are longer, rows are missing from the first.
      const int spare = params_.grows != 0 ? of.tiles * Traits::kTileQ - sequence.length_q : 0;
      first_row =
          (of.tiles - 1 - found_.rank) * Traits::kTileQ - spare / kRowsPerGroup * kRowsPerGroup;
      tile->first_row = first_row;
      // A bound that hides nothing is none, as in dense batches.
      const int right_offset = params_.score.right_offset + sequence.diagonal;
      if (sequence.length_k > Traits::kStepKeys) {
        alignment = kv_block_alignment(Traits::kStepKeys, first_row, Traits::kTileQ,
                                       right_offset < sequence.length_k - 1, right_offset);
      }
    }
    tile->head = head;
    tile->kv_block_alignment = alignment;
    const Steps<Traits> steps(params_.score, sequence, first_row, Traits::kTileQ, alignment);
    tile->first_key = steps.first;
    tile->end_key = steps.end;
    const float sink = sink_of<typename Traits::Element>(params_.score, head);
    tile->sink = sink;
    tile->begin = state_of_sink(sink);
  }

 private:
  static __device__ __forceinline__ int blocks() { return static_cast<int>(gridDim.x); }

  // Of the chunk: heads that have tiles of their own, and whether later tiles see more keys.
  __device__ __forceinline__ int heads() const {
    return Traits::kPacksHeads && packed_ ? params_.heads_kv : params_.heads_of_tiles;
  }
  __device__ __forceinline__ bool grows() const {
    return params_.grows != 0 && !(Traits::kPacksHeads && packed_);
  }

  using Walk = std::conditional_t<kTiles == Tiles::kDealt, TilesOfChunks, TilesInTurn>;

  static __device__ __forceinline__ Walk first_tiles() {
    if constexpr (kTiles == Tiles::kDealt) {
      return Walk(static_cast<int>(blockIdx.x));
    } else {
      return Walk();
    }
  }

  // Of the next tile that is taken, or was; below 0: who took it kept no more.
  __device__ __forceinline__ int next_number() {
    int number = -1;
    if (threadIdx.x % kThreadsPerWarp == 0) {
      // Where offsets overlap, there may be more tiles than rows.
      const bool kept = link_ < params_.chains_room;
      if (kTiles == Tiles::kTaken) {
        // What this kernel reads was there when decoding let it begin. It is read behind this.
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
    const int lane = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
    ChunkSequence own = {};
    if (first_ + lane < params_.sequences.count) own = read(first_ + lane);
    first_ += kSequencesPerChunk;
    int heads_per_kv = params_.by_heads_per_kv.number();  // that have tiles
    lanes_.own = TilesOfSequence::of(own.tiles, keys_of_longest(own), Traits::kTileQ);
    const int packed_tiles =
        ceil_div<Traits::kConsumers>(ceil_div<kRowsPerGroup>(own.sequence.length_q) * heads_per_kv);
    packed_ = packs(own, packed_tiles);
    if (packed_) {
      own.tiles = packed_tiles;
      lanes_.own = {packed_tiles, 0};
      heads_per_kv = 1;
    }
    __syncwarp();  // what was there was read
    chunk_[lane] = own;
    __syncwarp();
    const int keys =
        __reduce_add_sync(kFullWarp, own.tiles > 0 ? min(own.sequence.length_k, kMostKeys) : 0);
    const int tiles = __reduce_add_sync(kFullWarp, own.tiles);
    const int of_swizzle = heads_per_swizzle(params_.heads_kv, tiles * heads_per_kv,
                                             params_.tiles_of_swizzle, keys, params_.keys_of_l2) *
                           heads_per_kv;
    if constexpr (kTiles == Tiles::kDealt) {
      tiles_.begin_chunk(lanes_, tiles, of_swizzle);
    } else {
      tiles_.begin_chunk(tiles, heads(), of_swizzle);
    }
    return true;
  }

  // Whether the tiles of a chunk, of which this lane has a sequence, hold groups of several heads:
  // for each KV head so many tiles of it.
  __device__ __forceinline__ bool packs(const ChunkSequence& own, int packed_tiles) const {
    const Sequence& sequence = own.sequence;
    if (!Traits::kPacksHeads) return false;
    const bool fits = max(sequence.length_q, sequence.length_k) <= Traits::kStepKeys;
    const int spared = own.tiles * params_.by_heads_per_kv.number() - packed_tiles;
    return __all_sync(kFullWarp, fits) && __reduce_add_sync(kFullWarp, fits ? spared : 0) > 0;
  }

  __device__ __forceinline__ ChunkSequence read(int number) const {
    const SequenceParams& sequences = params_.sequences;
    const SequenceRows queries = sequences.queries_of(number);
    const SequenceRows keys = sequences.keys_of(number);
    // Rows that are heads see what the one query sees: the diagonal of later ones hides no more.
    const int rows = queries.length * params_.heads_per_tile;
    return {{queries.begin, keys.begin, rows, keys.length,
             sequences.diagonal_of(number, queries.length, keys.length)},
            queries.batch,
            keys.batch,
            ceil_div<Traits::kTileQ>(rows)};
  }

  // That the last tile of a sequence sees.
  __device__ __forceinline__ int keys_of_longest(const ChunkSequence& of) const {
    if (of.tiles == 0) return 0;
    const int first_row = (of.tiles - 1) * Traits::kTileQ;
    return max(0, of.sequence.end_key(params_.score, of.sequence.length_q - 1) -
                      of.sequence.first_key(params_.score, first_row));
  }

  const RaggedParams& params_;
  ChunkSequence* chunk_;
  Walk tiles_;
  WarpLanes lanes_ = {};
  TileOfChunk found_ = {};
  int head_ = 0;  // of a packed chunk the KV head
  bool packed_ = false;
  int first_ = 0;                            // sequence of the next chunk
  int link_ = static_cast<int>(blockIdx.x);  // in the chains, where the next tile's number is
};

}  // namespace flashmoe::sm90
