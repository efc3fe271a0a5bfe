// Which tile a cluster computes next: the work as a sequence of items, and which cluster takes
// which.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

// Consecutive token tiles of an expert with the same rows of the weights. With kept weights, a run
// is an item.
struct Run {
  int expert;
  int first_slot;  // of the expert's tokens
  int tokens;      // of the expert
  int row_tile;
  int next;  // next token tile
  int end;   // after the last token tile
};

// The sequence of items. Experts come in order. Within an expert, items come in groups of columns,
// that is of token tiles or pairs of them, and for each group all weight rows pass by. A warp has
// 32 experts in view, one per lane. All its lanes call the functions.
template <class Traits>
class Scheduler {
 public:
  __device__ __forceinline__ explicit Scheduler(const Params& params)
      : params_(params), lane_(static_cast<int>(threadIdx.x) % kThreadsPerWarp) {
    view(0, 0, 0);
  }

  // Items must be requested in increasing order. Returns false if there are no more.
  __device__ __forceinline__ bool find(int item, int rank, Tile* tile) {
    int owner;
    if (!find_owner(item, &owner)) return false;
    const int first_slot = __shfl_sync(kFullWarp, first_slot_, owner);
    const int tokens = __shfl_sync(kFullWarp, tokens_, owner);
    const int end = __shfl_sync(kFullWarp, end_, owner);
    place(params_, item - (end - items_of<kShares>(tokens, params_.row_tiles, Traits::kTileUnits)),
          rank, tokens, tile);
    tile->expert = first_ + owner;
    tile->first_slot += first_slot;
    return true;
  }

  // The same if items are runs.
  __device__ __forceinline__ bool find(int item, int rank, Run* run) {
    int owner;
    if (!find_owner(item, &owner)) return false;
    run->expert = first_ + owner;
    run->first_slot = __shfl_sync(kFullWarp, first_slot_, owner);
    run->tokens = __shfl_sync(kFullWarp, tokens_, owner);
    const int tiles = tiles_of<false>(units_of(run->tokens), Traits::kTileUnits);
    const int runs = runs_of(tiles);
    const int rows = row_pairs(params_.row_tiles);
    const int index = item - (__shfl_sync(kFullWarp, end_, owner) - runs * rows);
    const int most = ceil_div(tiles, runs);
    run->row_tile = 2 * (index % rows) + rank;
    run->next = index / rows * most;
    run->end = min(run->next + most, tiles);
    return true;
  }

  // Gives the next token tile of a run. `begins`: it is the first one.
  __device__ __forceinline__ void place(const Run& run, bool begins, Tile* tile) const {
    const int units = units_of(run.tokens);
    const int tiles = tiles_of<false>(units, Traits::kTileUnits);
    cut(units, tiles, run.next, run.tokens, run.row_tile < params_.row_tiles, tile);
    tile->expert = run.expert;
    tile->first_slot += run.first_slot;
    tile->row_tile = run.row_tile;
    tile->shared = 0;
    tile->reused = tiles > params_.tiles_per_run;
    tile->edge = begins;
  }

  // The tile of an item if all experts had equally many tokens. Returns false if there is no such
  // item.
  static __device__ __forceinline__ bool guess(const Params& params, int item, int rank,
                                               Tile* tile) {
    const int tokens = ceil_div(params.rows, params.experts);
    const int items = items_of<kShares>(tokens, params.row_tiles, Traits::kTileUnits);
    if (items == 0 || item / items >= params.experts) return false;
    place(params, item % items, rank, tokens, tile);
    tile->expert = item / items;
    return true;
  }

  // How many items of `up`, from the first one on, compute the token rows of the last tile found.
  __device__ __forceinline__ int needed() const { return needed_; }

 private:
  // In `up`, an item may be a pair of token tiles that share weights.
  static constexpr bool kShares = Traits::kGathers;

  // Brings the expert of an item into view and finds its lane.
  __device__ __forceinline__ bool find_owner(int item, int* owner) {
    for (;;) {
      const int end = __shfl_sync(kFullWarp, end_, kThreadsPerWarp - 1);
      if (item < end) break;
      if (first_ + kThreadsPerWarp >= params_.experts) return false;
      view(first_ + kThreadsPerWarp, end, __shfl_sync(kFullWarp, up_end_, kThreadsPerWarp - 1));
    }
    *owner = __popc(__ballot_sync(kFullWarp, item >= end_));
    if (follows_up()) needed_ = __shfl_sync(kFullWarp, up_end_, *owner);
    return true;
  }

  __device__ __forceinline__ bool follows_up() const {
    return !Traits::kGathers && params_.progress != nullptr;
  }
  static __device__ __forceinline__ int units_of(int tokens) {
    return ceil_div<kUnitTokens>(tokens);
  }
  // The number of token tiles, as few as possible. If it is odd, one tile stands alone, which costs
  // more traffic. If there are many, an even number of slightly narrower tiles is better.
  template <bool kPairs>
  static __device__ __forceinline__ int tiles_of(int units, int tile_units) {
    const int tiles = ceil_div(units, tile_units);
    return kPairs && tiles > Traits::kMostOddTiles ? (tiles + 1) / 2 * 2 : tiles;
  }
  // Columns of items with two token tiles each, of the same weights.
  template <bool kPairs>
  static __device__ __forceinline__ int shared_columns_of(int tiles) {
    return kPairs ? tiles / 2 : 0;
  }
  // Pairs of weight rows, for items whose blocks have the same tokens.
  static __device__ __forceinline__ int row_pairs(int row_tiles) { return (row_tiles + 1) / 2; }
  // Items of an expert with `tokens` tokens, in this kernel or in `up`.
  template <bool kPairs>
  static __device__ __forceinline__ int items_of(int tokens, int row_tiles, int tile_units) {
    const int tiles = tiles_of<kPairs>(units_of(tokens), tile_units);
    const int shared_columns = shared_columns_of<kPairs>(tiles);
    return shared_columns * row_tiles + (tiles - 2 * shared_columns) * row_pairs(row_tiles);
  }

  // Runs for `tiles` token tiles.
  __device__ __forceinline__ int runs_of(int tiles) const {
    return ceil_div(tiles, params_.tiles_per_run);
  }
  // Items of an expert with `tokens` tokens, as this kernel deals them.
  __device__ __forceinline__ int items_here(int tokens) const {
    if (!Traits::kKeeps) return items_of<kShares>(tokens, params_.row_tiles, Traits::kTileUnits);
    return runs_of(tiles_of<false>(units_of(tokens), Traits::kTileUnits)) *
           row_pairs(params_.row_tiles);
  }

  // More than the number of items, unless offsets give rows to several experts. Sums saturate here,
  // because they must not wrap.
  static constexpr int kMostItems = (1 << 30) - 1;

  // The inclusive sum over lanes, plus that of all earlier experts.
  __device__ __forceinline__ int sum_to_here(int in_front, int value) const {
#pragma unroll
    for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
      const int below = __shfl_up_sync(kFullWarp, value, distance);
      if (lane_ >= distance) value = min(value + below, kMostItems);
    }
    return min(in_front + value, kMostItems);
  }

  // Brings the experts from `first` on into view. `items` and `up_items` precede them, here and in
  // `up`. Clamps offsets to existing slots.
  __device__ __forceinline__ void view(int first, int items, int up_items) {
    first_ = first;
    const int expert = first + lane_;
    first_slot_ = tokens_ = 0;
    if (expert < params_.experts) {
      if (params_.counts != nullptr) {
        tokens_ = min(max(params_.counts[expert], 0), params_.rows);
      } else {
        first_slot_ = min(max(params_.offsets[expert], 0), params_.rows);
        const int end_slot = min(max(params_.offsets[expert + 1], 0), params_.rows);
        tokens_ = max(end_slot - first_slot_, 0);
      }
    }
    end_ = sum_to_here(items, items_here(tokens_));
    if (follows_up()) {
      up_end_ = sum_to_here(up_items,
                            items_of<true>(tokens_, params_.up_row_tiles, params_.up_tile_units));
    }
  }

  // Item `index` of an expert with `tokens` tokens, for block `rank` of the cluster.
  static __device__ __forceinline__ void place(const Params& params, int index, int rank,
                                               int tokens, Tile* tile) {
    const int units = units_of(tokens);
    const int tiles = tiles_of<kShares>(units, Traits::kTileUnits);
    const int shared_columns = shared_columns_of<kShares>(tiles);
    const bool shared = index < shared_columns * params.row_tiles;
    if (!shared) index -= shared_columns * params.row_tiles;
    const int columns = shared ? shared_columns : tiles - 2 * shared_columns;
    const int rows = shared ? params.row_tiles : row_pairs(params.row_tiles);
    const int groups = ceil_div(columns, params.columns_per_group);
    const int most = ceil_div(columns, groups);
    const int first_column = index / (most * rows) * most;
    const int columns_here = min(most, columns - first_column);
    index -= first_column * rows;
    const int row = index / columns_here;
    const int column = first_column + index % columns_here;
    tile->shared = shared;
    tile->reused = tiles > 1;
    tile->row_tile = shared ? row : 2 * row + rank;
    cut(units, tiles, shared ? 2 * column + rank : 2 * shared_columns + column, tokens,
        tile->row_tile < params.row_tiles, tile);
    tile->edge = 0;
  }

  // Sets the tokens of one of an expert's token tiles, `units` units in total. If `counts` is
  // false, nothing is stored for the tile. If tiles cannot be equal, the first ones are a unit
  // wider.
  static __device__ __forceinline__ void cut(int units, int tiles, int token_tile, int tokens,
                                             bool counts, Tile* tile) {
    const int narrow = units / tiles;
    const int wider = units % tiles;
    const int first_unit = token_tile * narrow + min(token_tile, wider);
    tile->units = narrow + (token_tile < wider ? 1 : 0);
    tile->tokens = counts ? min(tile->units * kUnitTokens, tokens - first_unit * kUnitTokens) : 0;
    tile->first_slot = first_unit * kUnitTokens;
    // Both blocks of a cluster must have the same number of steps after their products.
    if (Traits::kDifferentiates) tile->units = ceil_div(units, tiles);
  }

  const Params& params_;
  int lane_;
  int first_;  // first expert in view; the members below differ by lane
  int first_slot_;
  int tokens_;
  int end_;         // end of its items
  int up_end_ = 0;  // end of its items in `up`
  int needed_ = 0;
};

__device__ __forceinline__ int first_item() { return static_cast<int>(blockIdx.x) / kCluster; }
__device__ __forceinline__ int item_stride() { return static_cast<int>(gridDim.x) / kCluster; }

// Which items a cluster takes. Clusters take those of a layer's `down` dynamically: where `up` ends
// early, `down` begins early. The first block of a cluster takes an item while it loads the
// previous tile (or, if tiles are short, the one before that), and tells the other block. The
// result of an item does not depend on which cluster takes it.
template <class Traits>
struct Deal {
  const Params& params;
  const Shared<Traits>& shared;
  int rank;
  bool leader;
  uint32_t ticket;  // number of items taken before; in one thread of the first block

  __device__ __forceinline__ Deal(const Params& params_, const Shared<Traits>& shared_, int rank_)
      : params(params_), shared(shared_), rank(rank_), leader(threadIdx.x == 0) {}

  // Whether items are taken dynamically. Otherwise they are dealt in turn.
  __device__ __forceinline__ bool taken() const {
    return !Traits::kGathers && params.progress != nullptr;
  }

  // An item taken earlier than necessary is not available to clusters that could begin it at once.
  __device__ __forceinline__ void take() {
    if (taken() && rank == 0 && leader) {
      ticket = atomicAdd(params.progress + params.up_clusters * (kCluster * kConsumers), 1u);
    }
  }

  // Called some steps later, or in the next tile: announces the successor of tile `number`. Both
  // blocks have read the old entry of the slot: there are fewer stages than slots.
  __device__ __forceinline__ void tell(int number) const {
    static_assert(kCluster == 2);
    if (!taken() || rank != 0 || !leader) return;
    const int slot = number % Traits::kTileSlots;
    const uint32_t item = item_stride() + ticket;
    ptx::store_shared(shared.item(slot), item);
    ptx::store_async(ptx::map_to_rank(shared.item(slot), 1), static_cast<int32_t>(item),
                     ptx::map_to_rank(shared.dealt(slot), 1));
  }

  // At the end of tile `number`: returns the item of the next one.
  __device__ __forceinline__ int item_after(int item, int number) const {
    if (!taken()) return item + item_stride();
    const int slot = number % Traits::kTileSlots;
    if (rank == 0) {
      __syncwarp();
    } else {
      if (leader) ptx::mbarrier_arrive_expect(shared.dealt(slot), sizeof(int32_t));
      ptx::mbarrier_wait_cluster(shared.dealt(slot), number / Traits::kTileSlots % 2);
    }
    return static_cast<int>(ptx::load_shared_uint(shared.item(slot)));
  }
};

}  // namespace flashmoe::moe::sm90
