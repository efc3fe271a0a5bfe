// Grouped products on sm_90, warp-specialised and persistent.
//
//   up     a[s] = act(w_gate[e] x[t]) * (w_up[e] x[t])     slot s of expert e, of token t
//   down   y[s] = w_down[e] a[s] + bias[e]
//
// Weights are the M side of wgmma and tokens the N side, up to 192 of an expert, in steps of 64
// columns. So the width of a tile, which is chosen on the device for each expert, may be any
// multiple of 8, and a thread holds gate and up of the same element. A consumer warpgroup has 128
// rows of weights, 64 of either half, and all tokens of a tile: up to 192 accumulators a thread. In
// `up` its two consumers share a tile of 256 rows (128 of the gate and the same 128 of up); in
// `down` each has a tile of its own and they alternate, so that one's products are computed while
// the other writes out what it has.
//
// The first warpgroup loads: one warp issues the copies of weights (and in `down` of tokens) by
// TMA, three gather the rows of tokens by cp.async. Both end at the stage's mbarrier.
//
// Weights whose rows of gate and up are interleaved come in boxes of 64 rows, 32 of either, of
// which neighbouring ones are each other's other half: a thread has gates of one and a thread four
// lanes on the ups of the same rows, and they exchange what the other needs when products are over
// (take_apart).
//
// Blocks come in clusters of two, which take the same steps. In `up` the two have neighbouring
// token tiles of the same weights, and each loads one half of these for both; or, of the last of an
// odd number of token tiles, and in `down` always, neighbouring weight rows of the same tokens, of
// which in `down` each loads one half for both.
//
// Where rows of `down` are short a tile's output takes longer to leave than its products to be
// computed. There (Use::kShortDown) a consumer keeps the weights of 64 rows in registers while a
// run of token tiles of the expert passes by, of which both consumers multiply each by turns, and
// two warps of the first warpgroup send what these leave in shared memory.
//
// A layer's `down` begins while `up` still runs: its blocks come to multiprocessors as those of
// `up` leave them, wait for the tokens of an expert at a time (Progress), and take items one by one
// (Deal).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.h"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90 {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

inline constexpr uint16_t kWholeCluster = (1 << kCluster) - 1;
inline constexpr int kNone = -1;
// Named barriers: of each consumer its own, and its turn; or the second's to begin.
inline constexpr int kStoreBarrier = 1;
inline constexpr int kTurnBarrier = 3;
inline constexpr int kLagBarrier = 3;
inline constexpr int kGatherBarrier = 4;
// Of each buffer of the output of a consumer whose output another warp sends: it is filled, it is
// drained.
inline constexpr int kFilledBarrier = 5;
inline constexpr int kDrainedBarrier = 9;
inline constexpr int kFillingThreads = kThreadsPerGroup + kThreadsPerWarp;
// The step of a tile in which `up` says that the tile before is stored.
inline constexpr int kAnnounceStep = 3;
// How many steps before the end of a tile the next item is taken, and the other block is told.
inline constexpr int kTakeSteps = 6;
inline constexpr int kTellSteps = 2;
inline constexpr uint32_t kNoRow = 0xffffffffu;

// What a block, or of one whose consumers alternate one of them, computes in one pass of the main
// loop. The producer works it out and leaves it in shared memory.
struct alignas(16) Tile {
  int expert;
  int first_slot;  // of its tokens; with counts from the start of the batch
  int tokens;      // that there are; 0: nothing comes of this tile
  int units;       // that it is wide, of kUnitTokens; 0: there are no more tiles
  int row_tile;
  int shared;  // weights with the other block of the cluster
  int reused;  // weights by other tiles
  int edge;    // the first of a run, for which weights are kept; or of what follows the last tile
};

static_assert(sizeof(Tile) == kTileInfoBytes);

// Token tiles of an expert, one after another, by the same rows of the weights: an item where these
// are kept.
struct Run {
  int expert;
  int first_slot;  // of the expert's tokens
  int tokens;      // of the expert
  int row_tile;
  int next;  // token tile
  int end;   // behind the last one
};

// The work, one item of a cluster after another: experts in order, within one groups of columns of
// items, that is of token tiles or pairs of them, for each of which all weight rows pass by. A warp
// has 32 experts in view, one a lane. All its lanes call.
template <class Traits>
class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Params& params)
      : params_(params), lane_(static_cast<int>(threadIdx.x) % kThreadsPerWarp) {
    view(0, 0, 0);
  }

  // Items are asked for in rising order. False if there are no such.
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

  // The same where items are runs.
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

  // The next token tile of a run, and whether it is the first.
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

  // The tile of an item if all experts had as many tokens. False if there is none then.
  static __device__ __forceinline__ bool guess(const Params& params, int item, int rank,
                                               Tile* tile) {
    const int tokens = ceil_div(params.rows, params.experts);
    const int items = items_of<kShares>(tokens, params.row_tiles, Traits::kTileUnits);
    if (items == 0 || item / items >= params.experts) return false;
    place(params, item % items, rank, tokens, tile);
    tile->expert = item / items;
    return true;
  }

  // How many items of `up`, from the first on, give the rows of tokens that the last tile found
  // has.
  __device__ __forceinline__ int needed() const { return needed_; }

 private:
  // Pairs of token tiles are items of `up`, with weights that they share.
  static constexpr bool kShares = Traits::kGathers;

  // The lane that has the expert of an item, brought into view.
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
  // Token tiles, as few as can be. Where that is odd one more goes by itself, which costs more
  // traffic, but of many tiles it is as well to have an even number, a little narrower.
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
  // Of weights, that items have of which both blocks have the same tokens.
  static __device__ __forceinline__ int row_pairs(int row_tiles) { return (row_tiles + 1) / 2; }
  // Of an expert with so many tokens: here, or in `up`.
  template <bool kPairs>
  static __device__ __forceinline__ int items_of(int tokens, int row_tiles, int tile_units) {
    const int tiles = tiles_of<kPairs>(units_of(tokens), tile_units);
    const int shared_columns = shared_columns_of<kPairs>(tiles);
    return shared_columns * row_tiles + (tiles - 2 * shared_columns) * row_pairs(row_tiles);
  }

  // Runs that so many token tiles are cut into.
  __device__ __forceinline__ int runs_of(int tiles) const {
    return ceil_div(tiles, params_.tiles_per_run);
  }
  // Of an expert with so many tokens, as this kernel deals them out.
  __device__ __forceinline__ int items_here(int tokens) const {
    if (!Traits::kKeeps) return items_of<kShares>(tokens, params_.row_tiles, Traits::kTileUnits);
    return runs_of(tiles_of<false>(units_of(tokens), Traits::kTileUnits)) *
           row_pairs(params_.row_tiles);
  }

  // More items than there are, unless offsets give rows to several experts: sums end there, as they
  // must not wrap.
  static constexpr int kMostItems = (1 << 30) - 1;

  // The sum of what the lanes up to this one have, and of what is in front of all.
  __device__ __forceinline__ int sum_to_here(int in_front, int value) const {
#pragma unroll
    for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
      const int below = __shfl_up_sync(kFullWarp, value, distance);
      if (lane_ >= distance) value = min(value + below, kMostItems);
    }
    return min(in_front + value, kMostItems);
  }

  // Brings the experts from `first` on into view, in front of which there are so many items, here
  // and in `up`. Whatever offsets say, slots are such that there are.
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

  // Item `index` of an expert with so many tokens, for block `rank` of the cluster.
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

  // Which of an expert's tokens, so many units of them, one of its token tiles has, if anything is
  // to come of it. The first tiles are a unit wider than the others, if they are not all alike.
  static __device__ __forceinline__ void cut(int units, int tiles, int token_tile, int tokens,
                                             bool counts, Tile* tile) {
    const int narrow = units / tiles;
    const int wider = units % tiles;
    const int first_unit = token_tile * narrow + min(token_tile, wider);
    tile->units = narrow + (token_tile < wider ? 1 : 0);
    tile->tokens = counts ? min(tile->units * kUnitTokens, tokens - first_unit * kUnitTokens) : 0;
    tile->first_slot = first_unit * kUnitTokens;
  }

  const Params& params_;
  int lane_;
  int first_;  // of the experts in view; what follows is a lane's own
  int first_slot_;
  int tokens_;
  int end_;         // of its items
  int up_end_ = 0;  // of those of `up`
  int needed_ = 0;
};

// Where things are in shared memory.
template <class Traits>
struct Shared {
  uint32_t base;
  Tile* tiles;  // [kTileSlots]

  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const {
    return weights(stage) + Traits::kTokensOffset;
  }
  // The stage is loaded: the TMA warp says of how many bytes, and each gathering thread arrives.
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + Traits::kBarriersOffset + 8 * stage;
  }
  // The stage is free in both blocks of the cluster, whose consumer warps all arrive.
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return full(Traits::kStages + stage);
  }
  // The tile in that place is known.
  __device__ __forceinline__ uint32_t known(int slot) const {
    return full(2 * Traits::kStages + slot);
  }
  // `down`, the second block of a cluster: the item of the tile in that place has come, and where.
  __device__ __forceinline__ uint32_t dealt(int slot) const {
    return known(Traits::kTileSlots + slot);
  }
  __device__ __forceinline__ uint32_t item(int slot) const {
    return base + Traits::kItemsOffset + 4 * slot;
  }
};

__device__ __forceinline__ int first_item() { return static_cast<int>(blockIdx.x) / kCluster; }
__device__ __forceinline__ int item_stride() { return static_cast<int>(gridDim.x) / kCluster; }

// Leaves a tile where consumers look for the one of that number. The one that was there is done
// with: stages are fewer than places.
template <class Traits>
__device__ __forceinline__ void publish(const Shared<Traits>& shared, int number,
                                        const Tile& tile) {
  const int slot = number % Traits::kTileSlots;
  shared.tiles[slot] = tile;
  ptx::mbarrier_arrive(shared.known(slot));
}

// The copies by TMA for one tile, and what of them all steps have in common: what happens between a
// stage that is given back and the copy to it is time that consumers may have to wait.
template <class Traits>
struct TileCopies {
  const Params& params;
  const Shared<Traits>& shared;
  uint64_t policy;    // for weights
  uint32_t expected;  // bytes that a stage waits for
  int expert;
  int row;        // of the weights, the first
  int only_half;  // that this block copies, for both; kNone: it copies both for itself
  int token_row;  // of this block's half of the tokens
  int token_batch;
  uint32_t token_offset;
  const CUtensorMap* tokens;

  __device__ __forceinline__ TileCopies(const Params& params_, const Shared<Traits>& shared_,
                                        const Tile& tile, int rank)
      : params(params_), shared(shared_) {
    policy = tile.reused != 0 ? ptx::kEvictNormal : ptx::kEvictFirst;
    expected = Traits::kKeeps ? 0 : Traits::kWeightBytes;
    expert = tile.expert;
    row = tile.row_tile * Traits::kRowsToTile;
    only_half = Traits::kGathers && tile.shared != 0 ? rank : kNone;
    if (!Traits::kGathers) {
      expected += tile.units * kUnitTokens * kBoxRowBytes;
      const int half_tokens = tile.units * (kUnitTokens / kCluster);
      token_row = tile.first_slot + rank * half_tokens;
      token_batch = params.counts != nullptr ? tile.expert : 0;
      token_offset = rank * half_tokens * kBoxRowBytes;
      tokens = &params.tokens[tile.units - 1];
    }
  }

  __device__ __forceinline__ void copy(int stage, uint32_t offset, const CUtensorMap& map,
                                       int column, int first_row, bool both) const {
    const uint32_t to = shared.weights(stage) + offset;
    const int c0 = Traits::kTransposed ? first_row : column;
    const int c1 = Traits::kTransposed ? column : first_row;
    if (both) {
      ptx::tma_load_multicast(to, &map, shared.full(stage), policy, kWholeCluster, c0, c1, expert,
                              0);
    } else {
      ptx::tma_load(to, &map, shared.full(stage), policy, c0, c1, expert, 0);
    }
  }

  // Says what the stage waits for, and copies the weights of a step; one thread.
  __device__ __forceinline__ void load_weights(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), static_cast<int>(expected));
    copy_weights(stage, step);
  }

  __device__ __forceinline__ void copy_weights(int stage, int step) const {
    const int column = step * Traits::kStep;
    if constexpr (!Traits::kGathers) {
#pragma unroll
      for (int i = 0; i < Traits::kTileRows / Traits::kBoxRows; ++i) {
        copy(stage, i * Traits::kBoxBytes, params.weights[0], column, row + i * Traits::kRowsToBox,
             false);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Traits::kHalfRows / Traits::kBoxRows; ++i) {
        const int box_row = row + i * Traits::kRowsToBox;
        const uint32_t offset = i * Traits::kBoxBytes;
        if (only_half != kNone) {
          copy(stage, offset + only_half * Traits::kHalfBytes, params.weights[only_half], column,
               box_row + only_half * Traits::kRowsToHalf, true);
        } else {
          copy(stage, offset, params.weights[0], column, box_row, false);
          copy(stage, offset + Traits::kHalfBytes, params.weights[1], column,
               box_row + Traits::kRowsToHalf, false);
        }
      }
    }
  }

  // Where weights are kept these have stages of their own.
  __device__ __forceinline__ void load_kept_weights(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), Traits::kWeightBytes);
    copy_weights(stage, step);
  }
  __device__ __forceinline__ void load_only_tokens(int stage, int step) const {
    ptx::mbarrier_arrive_expect(shared.full(stage), static_cast<int>(expected));
    load_tokens(stage, step);
  }

  // Copies this block's half of a step's tokens, for both; one thread.
  __device__ __forceinline__ void load_tokens(int stage, int step) const {
    if (Traits::kGathers) return;
    ptx::tma_load_multicast(shared.tokens(stage) + token_offset, tokens, shared.full(stage),
                            ptx::kEvictNormal, kWholeCluster, step * Traits::kStep, token_row,
                            token_batch, 0);
  }
};

// `up` of a layer, one thread of each block, before it lets `down` begin: says that no tile is
// stored. Every block of `up` has done so when there is a block of `down`, which so never sees what
// was there before; nobody else looks.
__device__ __forceinline__ void begin_progress(const Params& params) {
  uint32_t* const words = params.progress + blockIdx.x * kConsumers;
  for (int group = 0; group < kConsumers; ++group) words[group] = 0;
  if (blockIdx.x == 0) params.progress[gridDim.x * kConsumers] = 0;
  __threadfence();
}

// How much of `up` a warp of `down` knows to be over. Items of `up` go to its clusters in turn.
struct Progress {
  int known = 0;  // items from the first on that are stored

  // Waits until so many are stored and the copy engine may load what they gave; a whole warp. This
  // ends: when there is a block of `down`, all of `up` have begun, each has its multiprocessor
  // until it ends, and they wait for nothing that `down` does. Items here are those that they take:
  // both read the same offsets.
  __device__ __forceinline__ void wait_for(const Params& params, int needed) {
    if (needed <= known) return;
    do {
      unsigned first = INT_MAX;  // that is not stored
      for (int cluster = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
           cluster < params.up_clusters; cluster += kThreadsPerWarp) {
        static_assert(kCluster * kConsumers == 4);
        const uint4 tiles = ptx::load_relaxed(params.progress + cluster * kCluster * kConsumers);
        const unsigned stored = min(min(tiles.x, tiles.y), min(tiles.z, tiles.w));
        first = min(first, stored * params.up_clusters + cluster);
      }
      known = static_cast<int>(__reduce_min_sync(kFullWarp, first));
    } while (known < needed);
    __threadfence();
    __syncwarp();
    ptx::fence_proxy_async();
  }
};

// Which items a cluster takes. Those of a layer's `down` are taken as clusters get to them: where
// `up` ends early `down` begins early. The first block of a cluster takes one while it loads the
// tile before, or where tiles are short the one before that, and tells the other. What an item
// gives does not depend on who takes it.
template <class Traits>
struct Deal {
  const Params& params;
  const Shared<Traits>& shared;
  int rank;
  bool leader;
  uint32_t ticket;  // of the first block, one thread: how many were taken before

  __device__ __forceinline__ Deal(const Params& params_, const Shared<Traits>& shared_, int rank_)
      : params(params_), shared(shared_), rank(rank_), leader(threadIdx.x == 0) {}

  // Else items are dealt out in turn.
  __device__ __forceinline__ bool taken() const {
    return !Traits::kGathers && params.progress != nullptr;
  }

  // What is taken sooner than it must be is not there for those who could begin with it at once.
  __device__ __forceinline__ void take() {
    if (taken() && rank == 0 && leader) {
      ticket = atomicAdd(params.progress + params.up_clusters * (kCluster * kConsumers), 1u);
    }
  }

  // Some steps later, or in the next tile: says what follows tile `number`. What was in the same
  // place has been read, in both blocks: stages are fewer than places.
  __device__ __forceinline__ void tell(int number) const {
    static_assert(kCluster == 2);
    if (!taken() || rank != 0 || !leader) return;
    const int slot = number % Traits::kTileSlots;
    const uint32_t item = item_stride() + ticket;
    ptx::store_shared(shared.item(slot), item);
    ptx::store_async(ptx::map_to_rank(shared.item(slot), 1), static_cast<int32_t>(item),
                     ptx::map_to_rank(shared.dealt(slot), 1));
  }

  // At the end of tile `number`: the item of the next one.
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

// While `up` waits for routing: begins to fetch into the L2 the weights that this block will
// probably begin with. Routing may turn out otherwise, and then that was in vain; with fewer tokens
// than these for an expert some are likely to have none. One thread.
template <class Traits>
__device__ __forceinline__ void fetch_ahead(const Params& params) {
  constexpr int kFewTokens = 4;
  constexpr int kStepsAhead = 6;  // some 25 MB on an H200
  if (params.rows / kFewTokens < params.experts) return;
  const int rank = static_cast<int>(ptx::cluster_rank());
  Tile tile;
  if (!Schedule<Traits>::guess(params, first_item(), rank, &tile)) return;
  const int steps = min(ceil_div<Traits::kStep>(params.columns), kStepsAhead);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    for (int half = 0; half < kHalves; ++half) {
      if (tile.shared != 0 && half != rank) continue;
      for (int i = 0; i < Traits::kHalfRows / Traits::kBoxRows; ++i) {
        const int column = step * Traits::kStep;
        const int row = tile.row_tile * Traits::kRowsToTile + half * Traits::kRowsToHalf +
                        i * Traits::kRowsToBox;
        ptx::tma_prefetch(&params.weights[half], Traits::kTransposed ? row : column,
                          Traits::kTransposed ? column : row, tile.expert, 0);
      }
    }
  }
}

// Behind all copies: waits until stages have been given back by both blocks of the cluster. A block
// must not end before what the other one says to its barriers has come. `up` keeps its last stage.
template <class Traits>
__device__ __forceinline__ void wait_given_back(const Shared<Traits>& shared,
                                                PipelineState<Traits::kStages> pipe) {
#pragma unroll 1
  for (int stage = Traits::kGathers ? 1 : 0; stage < Traits::kStages; ++stage) {
    ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
    pipe.advance();
  }
}

// Issues the copies by TMA, one warp. A layer's `down` begins while `up` still runs: what is ahead
// of that is over, since `up` waited for it before it let this kernel begin.
template <class Traits>
__device__ __forceinline__ void produce(const Params& params, const Shared<Traits>& shared) {
  const int rank = static_cast<int>(ptx::cluster_rank());
  const bool leader = threadIdx.x == 0;
  const int steps = ceil_div<Traits::kStep>(params.columns);
  const bool follows = !Traits::kGathers && params.progress != nullptr;
  if (!Traits::kGathers && !follows) ptx::wait_for_dependencies();
  // Of so short a tile what is taken in it would come too late.
  const bool few_steps = !Traits::kGathers && steps < 2 * kTakeSteps;
  Deal<Traits> deal(params, shared, rank);
  if (few_steps) deal.take();
  Schedule<Traits> schedule(params);
  Progress progress;
  PipelineState<Traits::kStages> pipe;
  Tile tile = {};
  int sent = 0;
  int item = first_item();
  int step = 0;  // of this tile, that is next
  bool more = schedule.find(item, rank, &tile);
  if (follows && more) {
    step = min(steps, Traits::kStages);
    const TileCopies<Traits> copies(params, shared, tile, rank);
    if (leader) {
#pragma unroll 1
      for (int i = 0; i < step; ++i) copies.load_weights(i, i);
    }
    progress.wait_for(params, schedule.needed());
    if (leader) {
#pragma unroll 1
      for (int i = 0; i < step; ++i) copies.load_tokens(i, i);
    }
    __syncwarp();
    pipe.advance(step);
  }
  while (more) {
    const TileCopies<Traits> copies(params, shared, tile, rank);
    if (leader) publish(shared, sent, tile);
    if (follows) progress.wait_for(params, schedule.needed());
    const auto load_until = [&](int end) {
#pragma unroll 1
      for (; step < end; ++step) {
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (leader) {
          copies.load_weights(pipe.stage, step);
          copies.load_tokens(pipe.stage, step);
        }
        __syncwarp();
        pipe.advance();
      }
    };
    if (few_steps) {
      deal.tell(sent);
      deal.take();
    } else if (!Traits::kGathers) {
      load_until(steps - kTakeSteps);
      deal.take();
      load_until(steps - kTellSteps);
      deal.tell(sent);
    }
    load_until(steps);
    step = 0;
    item = deal.item_after(item, sent);
    ++sent;
    more = schedule.find(item, rank, &tile);
  }
  if (leader) {
    tile.units = 0;
    for (int end = 0; end < (Traits::kAlternates ? kConsumers : 1); ++end) {
      tile.edge = end == 0;
      publish(shared, sent + end, tile);
    }
  }
  __syncwarp();
  wait_given_back(shared, pipe);
}

// The same where weights are kept: a run's come first, in stages of their own, then the tokens of
// one of its tiles after another.
template <class Traits>
__device__ __forceinline__ void produce_runs(const Params& params, const Shared<Traits>& shared) {
  constexpr int kSteps = Traits::kKeptSteps;
  constexpr int kTellStep = kSteps - 1;  // of the last tile of a run
  const int rank = static_cast<int>(ptx::cluster_rank());
  const bool leader = threadIdx.x == 0;
  const bool follows = params.progress != nullptr;
  if (!follows) ptx::wait_for_dependencies();
  Deal<Traits> deal(params, shared, rank);
  Schedule<Traits> schedule(params);
  Progress progress;
  PipelineState<Traits::kStages> pipe;
  Tile tile = {};
  Run run;
  int sent = 0;
  bool more = schedule.find(first_item(), rank, &run);
  for (int number = 0; more; ++number) {
    for (bool begins = true; run.next < run.end; ++run.next, begins = false) {
      schedule.place(run, begins, &tile);
      if (leader) publish(shared, sent, tile);
      ++sent;
      if (begins) {
        const TileCopies<Traits> copies(params, shared, tile, rank);
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
          if (leader) copies.load_kept_weights(pipe.stage, step);
          __syncwarp();
          pipe.advance();
        }
        if (follows) progress.wait_for(params, schedule.needed());
      }
      const TileCopies<Traits> copies(params, shared, tile, rank);
      const bool last = run.next + 1 == run.end;
      if (last) deal.take();
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        if (last && step == kTellStep) deal.tell(number);
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (leader) copies.load_only_tokens(pipe.stage, step);
        __syncwarp();
        pipe.advance();
      }
    }
    const int item = first_item() + number * item_stride();  // where they are not taken
    more = schedule.find(deal.item_after(item, number), rank, &run);
  }
  if (leader) {
    tile.units = 0;
    publish(shared, sent, tile);
  }
  __syncwarp();
  wait_given_back(shared, pipe);
}

// Where the chunk of 16 bytes lies that is so many behind `base`. Worked out anew for every step:
// the compiler would keep 64 bits for each row.
__device__ __forceinline__ const uint16_t* chunk_at(const uint16_t* base, uint32_t chunks) {
  const uint16_t* address;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(chunks), "l"(base));
  return address;
}

// Where rows of x begin, in chunks of 16 bytes, or kNoRow: for the tile that gathering threads come
// to next. The table is in shared memory.
template <class Traits>
struct NextRows {
  static constexpr int kRows = Traits::kTileTokens / Traits::kGatherThreads;  // of a thread
  static_assert(Traits::kTileTokens % Traits::kGatherThreads == 0);
  int pairs[kRows];

  // Begins to read which rows they are.
  __device__ __forceinline__ void request(const Params& params, const Tile& tile, int thread) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread + i * Traits::kGatherThreads;
      pairs[i] = kNone;
      if (row < tile.tokens) pairs[i] = params.pairs[tile.first_slot + row];
    }
  }
  __device__ __forceinline__ void store(const Params& params, uint32_t table, int thread) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t offset = kNoRow;
      if (pairs[i] >= 0 && pairs[i] < params.rows) {
        offset = static_cast<uint32_t>(pairs[i] / params.top_k) * params.x_row_chunks;
      }
      ptx::store_shared(table + 4 * (thread + i * Traits::kGatherThreads), offset);
    }
  }
};

// Gathers rows of x: threads 0 to kGatherThreads - 1 of some whole warps. Eight threads copy the
// 128 bytes that a step takes of a row. Which rows the next tile has is found out while this one is
// copied.
template <class Traits>
__device__ __forceinline__ void gather(const Params& params, const Shared<Traits>& shared,
                                       int thread) {
  constexpr int kChunk = 8;  // elements of 16 bytes
  constexpr int kThreadsPerRow = kBoxColumns / kChunk;
  constexpr int kRowsApart = Traits::kGatherThreads / kThreadsPerRow;
  constexpr int kRows = Traits::kTileTokens / kRowsApart;
  constexpr int kStoreStep = 2;  // by which what was requested after the first one has come
  static_assert(kRowsApart % 8 == 4, "every second row of a thread has the same swizzle");
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int steps = ceil_div<Traits::kStep>(params.columns);
  const int store_step = min(kStoreStep, steps - 1);
  const int chunk = thread % kThreadsPerRow;
  const int first_row = thread / kThreadsPerRow;
  const uint32_t places[2] = {
      static_cast<uint32_t>(first_row * kBoxRowBytes + (chunk ^ (first_row % 8)) * 16),
      static_cast<uint32_t>(first_row * kBoxRowBytes + (chunk ^ ((first_row + 4) % 8)) * 16)};
  const uint32_t table = shared.base + Traits::kRowsOffset;
  Schedule<Traits> schedule(params);
  PipelineState<Traits::kStages> pipe;
  NextRows<Traits> next;
  Tile tile;
  int item = first_item();
  bool more = schedule.find(item, rank, &tile);
  if (more) {
    next.request(params, tile, thread);
    next.store(params, table, thread);
  }
  while (more) {
    ptx::named_barrier_sync(kGatherBarrier, Traits::kGatherThreads);
    uint32_t offsets[kRows];  // of the rows of x, in chunks
    uint32_t known = 0;       // a bit for each row that has a token
    // Where a tile is wider than its tokens zeros follow them: what is computed of two columns at
    // once must not depend on what was there before.
    const int rows = tile.units * kUnitTokens - first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offsets[i] = ptx::load_shared_uint(table + 4 * (first_row + i * kRowsApart));
      if (offsets[i] == kNoRow) {
        offsets[i] = 0;
      } else {
        known |= 1u << i;
      }
    }
    ptx::named_barrier_sync(kGatherBarrier, Traits::kGatherThreads);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int column = step * Traits::kStep + chunk * kChunk;
      const uint32_t valid = column < params.columns ? known : 0;
      const uint16_t* const source = params.x + column;
      const uint32_t destination = shared.tokens(pipe.stage);
      ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i * kRowsApart < rows) {
          ptx::cp_async_16_or_zero(destination + places[i % 2] + i * kRowsApart * kBoxRowBytes,
                                   chunk_at(source, offsets[i]), (valid & (1u << i)) != 0);
        }
      }
      ptx::cp_async_arrive(shared.full(pipe.stage));
      pipe.advance();
      if (step == 0) {
        item += item_stride();
        more = schedule.find(item, rank, &tile);
        if (more) next.request(params, tile, thread);
      }
      if (step == store_step && more) next.store(params, table, thread);
    }
  }
}

// 1 + e^-z, or so much that the product of two is finite and z divided by it is as good as 0; of a
// NaN that too, so that z has to be a factor of what it is for.
__device__ __forceinline__ float sigmoid_divisor(float z) {
  constexpr float kMost = 62.0f;
  return 1.0f + numeric::exp2_approx(fminf(-kLog2E * z, kMost));
}

// The activation of z.
template <int kCurve>
__device__ __forceinline__ float activate(const Params& params, float z) {
  if constexpr (kCurve == kIdentity) {
    return z;
  } else if constexpr (kCurve == kSwish) {
    const float exponent = z * fmaf(params.swish_cube, z * z, params.swish_scale);
    return times_sigmoid(z, -exponent);
  } else if constexpr (kCurve == kGeluErf) {
    return gelu(z);
  } else {
    return relu(z, params.curve == kRelu2);
  }
}

// A value that all lanes of the warp agree on, so that the compiler knows: it keeps what follows
// from it in uniform registers, of which wgmma takes its descriptors.
__device__ __forceinline__ int uniform(int value) {
  return static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<unsigned>(value)));
}

// The products of a tile of kTokens tokens that a thread of a consumer has: of 64 rows of each
// half.
template <int kTokens>
struct Products {
  float first[kTokens / 2];
  float second[kTokens / 2];
};

// The state of a consumer warpgroup. A main loop and what follows it are compiled for every width
// of a tile: if they had the latter in common, ptxas would have to bring the accumulators of all
// main loops to the same registers, and lets products wait for each other rather than that (C7511).
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;

  const Params& params;
  const Shared<Traits>& shared;
  int group;
  PipelineState<Traits::kStages> pipe;
  int held = kNone;  // the last stage of the tile before, by way of which its output leaves
  int sent = 0;      // parts of the output: of this tile in `up`, else of all

  __device__ __forceinline__ Consumer(const Params& params_, const Shared<Traits>& shared_,
                                      int group_)
      : params(params_), shared(shared_), group(group_) {}

  // Of each half of the tile's rows, those of consumers before this one.
  __device__ __forceinline__ int rows_before() const {
    return Traits::kAlternates ? 0 : group * kConsumerRows;
  }

  // Says to both blocks of the cluster that this warp is done with a stage.
  __device__ __forceinline__ void release(int stage) const {
    if (ptx::elect_one()) {
#pragma unroll
      for (uint32_t rank = 0; rank < kCluster; ++rank) {
        ptx::mbarrier_arrive_cluster(ptx::map_to_rank(shared.empty(stage), rank));
      }
    }
  }

  // Lets `down` know that one more tile of this consumer is stored.
  __device__ __forceinline__ void announce() const {
    if (warp_of_group() == 0) {
      if (lane_index() == 0) {
        ptx::tma_store_wait();
        ptx::fence_proxy_async();
        ptx::add_release(params.progress + blockIdx.x * kConsumers + group, 1);
      }
      __syncwarp();
    }
  }

  // Gives the stage back by way of which the last tile's output has left.
  __device__ __forceinline__ void give_back() const {
    if (held == kNone) return;
    if (warp_of_group() == 0) {
      if (lane_index() == 0) ptx::tma_store_wait_read();
      __syncwarp();
    }
    release(held);
  }

  // Begins the products of a step, which the first of a tile overwrite the accumulators with.
  template <int kTokens>
  __device__ __forceinline__ void issue(Products<kTokens>& products, bool begins) const {
    using Mma = ptx::Wgmma<Element, kTokens>;
    constexpr int kSliceBytes =
        Traits::kTransposed ? 16 * kBoxRowBytes : 32;  // 16 columns of weights
    const uint64_t a =
        ptx::swizzled_descriptor(shared.weights(pipe.stage) + rows_before() * kBoxRowBytes, 16);
    const uint64_t b = ptx::swizzled_descriptor(shared.tokens(pipe.stage), 16);
    ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
    if (Traits::kGathers) ptx::fence_proxy_async_shared();
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kStep / 16; ++slice) {
      const bool add = slice > 0 || !begins;
      const uint64_t first = ptx::advance(a, kSliceBytes * slice);
      const uint64_t second = ptx::advance(first, Traits::kHalfBytes);
      const uint64_t tokens = ptx::advance(b, 32 * slice);
      if constexpr (Traits::kTransposed) {
        Mma::multiply_major(products.first, first, tokens, add);
        Mma::multiply_major(products.second, second, tokens, add);
      } else {
        Mma::multiply(products.first, first, tokens, add);
        Mma::multiply(products.second, second, tokens, add);
      }
    }
    ptx::wgmma_commit();
  }

  // The main loop. Consumers that alternate do so by turns, which end when all products are begun.
  // Otherwise the second begins a tile a step later than the first, so that one's products go on
  // while the other writes out what it has.
  template <int kTokens>
  __device__ __forceinline__ void multiply(Products<kTokens>& products) {
    const int steps = ceil_div<Traits::kStep>(params.columns);
    const bool lets_lag = !Traits::kAlternates && group == 0;
    // The first consumer may not come to the barrier for the next tile before the second has come
    // for this one. It needs a stage for that which the second still has; but not of tiles so
    // short.
    const bool meets = steps + 1 < Traits::kStages;
    const auto let_lag = [&] {
      if (meets) {
        ptx::named_barrier_sync(kLagBarrier, 2 * kThreadsPerGroup);
      } else {
        ptx::named_barrier_arrive(kLagBarrier, 2 * kThreadsPerGroup);
      }
    };
    if (Traits::kAlternates) {
      ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    } else if (group == 1) {
      ptx::named_barrier_sync(kLagBarrier, 2 * kThreadsPerGroup);
    }
    issue(products, true);
    if (!Traits::kAlternates) give_back();
    int last_stage = pipe.stage;
    pipe.advance();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      // Where memory is what all wait for, a stage is given back before the next one has come. What
      // all warps say, as they have to wait for products alike.
      const bool come =
          ptx::named_barrier_all(kStoreBarrier + group, kThreadsPerGroup,
                                 ptx::mbarrier_test(shared.full(pipe.stage), pipe.parity));
      if (!come) {
        ptx::wgmma_wait<0>();
        release(last_stage);
      }
      issue(products, false);
      if (lets_lag && step == 1) let_lag();
      // By now the stores are over.
      if (!Traits::kAlternates && step == kAnnounceStep && held != kNone) announce();
      if (come) {
        ptx::wgmma_wait<1>();
        release(last_stage);
      }
      last_stage = pipe.stage;
      pipe.advance();
    }
    if (Traits::kAlternates) {
      ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kThreadsPerGroup);
    }
    ptx::wgmma_wait<0>();
    if (lets_lag && steps == 1) let_lag();
    ptx::pin(products.first);
    ptx::pin(products.second);
    if (Traits::kAlternates) {
      release(last_stage);
    } else {
      held = last_stage;
    }
  }

  // Weights that a consumer keeps, as the A operands of wgmma: its 64 rows, 16 columns a slice.
  struct Kept {
    static constexpr int kSlices = Traits::kStep / 16;
    uint32_t values[Traits::kKeptSteps * kSlices][4];
  };

  // Takes a run's weights from their stages.
  __device__ __forceinline__ void keep(Kept* kept) {
    const int lane = lane_index();
    const int row = group * kConsumerRows + warp_of_group() * 16 + lane % 16;
    const int chunk = lane / 16;
    PipelineState<Traits::kStages> first = pipe;
#pragma unroll
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
      const uint32_t from = shared.weights(pipe.stage) + row * kBoxRowBytes;
#pragma unroll
      for (int slice = 0; slice < Kept::kSlices; ++slice) {
        ptx::ldmatrix_x4(kept->values[step * Kept::kSlices + slice],
                         from + ((2 * slice + chunk) ^ (row % 8)) * 16);
      }
      pipe.advance();
    }
    // What was read by threads is loaded anew by the copy engine, this block's or the other one's.
    ptx::fence_proxy_async_shared();
    __syncwarp();
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      release(first.stage);
      first.advance();
    }
  }

  // The main loop with weights that are kept. Consumers take turns, which end when all products of
  // a tile are begun.
  template <int kTokens>
  __device__ __forceinline__ void multiply_kept(float (&products)[kTokens / 2], const Kept& kept) {
    using Mma = ptx::Wgmma<Element, kTokens>;
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    int last_stage = 0;
#pragma unroll
    for (int step = 0; step < Traits::kKeptSteps; ++step) {
      const uint64_t tokens = ptx::swizzled_descriptor(shared.tokens(pipe.stage), 16);
      ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < Kept::kSlices; ++slice) {
        Mma::multiply_by_rows(products, kept.values[step * Kept::kSlices + slice],
                              ptx::advance(tokens, 32 * slice), step + slice > 0);
      }
      ptx::wgmma_commit();
      if (step > 0) {
        ptx::wgmma_wait<1>();
        release(last_stage);
      }
      last_stage = pipe.stage;
      pipe.advance();
    }
    ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kThreadsPerGroup);
    ptx::wgmma_wait<0>();
    ptx::pin(products);
    release(last_stage);
  }

  __device__ __forceinline__ float bias_of(const Bias& bias, int expert, int row) const {
    if (row >= params.out_rows) return 0.0f;
    return load_bias<Element>(bias, expert, row);
  }

  // Puts the weights of the tile's pairs, or ones, into shared memory.
  __device__ __forceinline__ void load_scales(const Tile& tile) const {
    ptx::named_barrier_sync(kStoreBarrier + group,
                            kThreadsPerGroup);  // the last tile's are done with
    for (int i = thread_index() % kThreadsPerGroup; i < tile.tokens; i += kThreadsPerGroup) {
      float scale = 1.0f;
      if (params.pair_weights != nullptr) {
        const int pair = params.pairs[tile.first_slot + i];
        scale = pair >= 0 && pair < params.rows ? params.pair_weights[pair] : 0.0f;
      }
      ptx::store_shared(scales() + 4 * i, scale);
    }
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
  }
  __device__ __forceinline__ uint32_t scales() const {
    return shared.base + Traits::kScalesOffset + group * Traits::kScaleBytes;
  }

  __device__ __forceinline__ uint32_t out_buffer(int index) const {
    if (!Traits::kGathers) {
      // So that nothing is kept.
      const int group_here = Traits::kKeeps ? group : thread_index() / kThreadsPerGroup - 1;
      return shared.base + Traits::kOutOffset +
             (group_here * Traits::kOutBuffers + index) * Traits::kOutBytes;
    }
    return shared.weights(held) + index * Traits::kHalfBytes + group * Traits::kOutBytes;
  }

  // Of a thread's values, which of this consumer's 64 rows of the output those of index e / 2 are.
  static __device__ __forceinline__ int row_of(int index) {
    const int warp = warp_of_group();
    const int lane = lane_index();
    if (Traits::kInterleaved) return lane / 4 % 2 * 32 + warp * 8 + lane / 8 + 4 * index;
    return warp * 16 + lane / 4 + 8 * index;
  }

  // Makes two 8x8 matrices for stmatrix of pairs of tokens, from the values of both of a thread's
  // rows (row_of): of a warp's rows 8 w to 8 w + 7 and of those 32 further on.
  static __device__ __forceinline__ void gather_rows(uint32_t& first, uint32_t& second) {
    const int lane = lane_index();
    const bool odd = lane / 4 % 2 != 0;
    const bool upper = lane >= 16;
    const int from = lane / 4 % 4 * 8 + (upper ? 4 : 0) + lane % 4;
    const uint32_t a = __shfl_sync(kFullWarp, odd ? second : first, from);
    const uint32_t b = __shfl_sync(kFullWarp, odd ? first : second, from ^ 4);
    first = upper ? b : a;
    second = upper ? a : b;
  }

  // Of products with rows of gate and up interleaved, makes the gates (first) and the ups (second)
  // of the rows of row_of: lanes whose row was a gate's keep those of the first 64 rows and get
  // their ups, the others keep the ups of the next 64 and get their gates.
  template <int kTokens>
  static __device__ __forceinline__ void take_apart(Products<kTokens>& products) {
    const bool odd = lane_index() / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const float given = odd ? products.first[i] : products.second[i];
      const float got = __shfl_xor_sync(kFullWarp, given, 4);
      products.first[i] = odd ? got : products.first[i];
      products.second[i] = odd ? products.second[i] : got;
    }
  }

  // Writes 64 rows of values of all tokens, transposed: from `column` on of the tokens' rows.
  // values(block, v) gives those of a block of 8 tokens. `sent` counts what the tile has sent.
  template <int kTokens, class Values>
  __device__ __forceinline__ void store(const Tile& tile, const CUtensorMap (&maps)[kOutHeights],
                                        int column, int* sent, const Values& values) const {
    constexpr int kPairs = Traits::kOutTokens / 16;  // of blocks of 8 tokens: what stmatrix stores
    constexpr int kParts = ceil_div(kTokens, Traits::kOutTokens);
    const int lane = lane_index();
    const int warp = warp_of_group();
    const bool leader = warp == 0 && lane == 0;
    const int matrix_row = lane % 8;
    const int chunk = Traits::kInterleaved ? warp + 4 * (lane / 8 % 2) : 2 * warp + lane / 8 % 2;
    const uint32_t lane_offset =
        (lane / 16 * 8 + matrix_row) * kBoxRowBytes + ((chunk ^ matrix_row) * 16);
    const int batch = params.counts != nullptr ? tile.expert : 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int buffer = *sent % Traits::kOutBuffers;
      const uint32_t to = out_buffer(buffer);
      // For what left this buffer before.
      if (Traits::kKeeps) {
        if (*sent >= Traits::kOutBuffers) wait_drained(buffer);
      } else {
        if (leader && *sent >= Traits::kOutBuffers) {
          ptx::tma_store_wait_read_but<Traits::kOutBuffers - 1>();
        }
        ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      }
      ++*sent;
#pragma unroll
      for (int i = 0; i < kPairs && part * kPairs + i < kTokens / 16; ++i) {
        uint32_t packed[4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          float v[4];
          values(2 * (part * kPairs + i) + block, v);
          packed[2 * block] = Numeric::pack(v[0], v[1]);
          packed[2 * block + 1] = Numeric::pack(v[2], v[3]);
          if (Traits::kInterleaved) gather_rows(packed[2 * block], packed[2 * block + 1]);
        }
        ptx::stmatrix_x4_trans(to + lane_offset + i * 16 * kBoxRowBytes, packed[0], packed[1],
                               packed[2], packed[3]);
      }
      if (Traits::kKeeps) {
        ptx::named_barrier_arrive(filled(buffer), kFillingThreads);
        continue;
      }
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (leader) {
        ptx::fence_proxy_async_shared();  // of what all have stored, once
        send(tile, maps, column, part * Traits::kOutTokens, batch, to);
        ptx::tma_store_commit();
      }
    }
  }

  // The named barriers of a buffer.
  __device__ __forceinline__ int filled(int buffer) const {
    return kFilledBarrier + group * Traits::kOutBuffers + buffer;
  }
  __device__ __forceinline__ int drained(int buffer) const {
    return kDrainedBarrier + group * Traits::kOutBuffers + buffer;
  }
  __device__ __forceinline__ void wait_drained(int buffer) const {
    ptx::named_barrier_sync(drained(buffer), kFillingThreads);
  }

  // Sends what this consumer leaves in its buffers, part after part of its tiles: one warp of the
  // first warpgroup, so that the consumer waits for nothing but the buffer that it comes to next.
  __device__ __forceinline__ void send_all() {
    const bool leader = lane_index() == 0;
    for (int number = 0;; ++number) {
      const int slot = number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), number / Traits::kTileSlots % 2);
      const Tile& tile = shared.tiles[slot];
      if (tile.units == 0) break;
      const int batch = params.counts != nullptr ? tile.expert : 0;
      const int row = tile.row_tile * Traits::kOutRows + rows_before();
      for (int first = 0; first < tile.units * kUnitTokens; first += Traits::kOutTokens) {
        const int buffer = sent % Traits::kOutBuffers;
        ++sent;
        ptx::named_barrier_sync(filled(buffer), kFillingThreads);
        if (leader) {
          ptx::fence_proxy_async_shared();  // of what all have stored, once
          send(tile, params.out, row, first, batch, out_buffer(buffer));
          ptx::tma_store_commit();
          ptx::tma_store_wait_read();
        }
        __syncwarp();
        ptx::named_barrier_arrive(drained(buffer), kFillingThreads);
      }
    }
    if (leader) ptx::tma_store_wait();
    __syncwarp();
  }

  // At the end: meets the sender at the barriers of buffers that nobody fills again.
  __device__ __forceinline__ void wait_sent() const {
    for (int buffer = 0; buffer < min(sent, Traits::kOutBuffers); ++buffer) wait_drained(buffer);
  }

  // Sends the rows of at most kOutTokens tokens from `first` on, as many as there are; one thread.
  __device__ __forceinline__ void send(const Tile& tile, const CUtensorMap (&maps)[kOutHeights],
                                       int column, int first, int batch, uint32_t from) const {
    constexpr int kBoxRows[] = {kOutBoxRows[0], kOutBoxRows[1], kOutBoxRows[2]};
    if (column >= params.out_rows) return;
    const int rows = min(Traits::kOutTokens, tile.tokens - first);
    int row = 0;
#pragma unroll
    for (int height = 0; height < kOutHeights; ++height) {
#pragma unroll 1
      for (; row + kBoxRows[height] <= rows; row += kBoxRows[height]) {
        ptx::tma_store(&maps[height], from + row * kBoxRowBytes, column,
                       tile.first_slot + first + row, batch, 0);
      }
    }
  }

  // Products with what comes before the activation: the weights of the tokens' pairs and the bias.
  template <int kCount>
  struct Adjusted {
    const float (&products)[kCount];
    uint32_t scales;
    float biases[2];  // of a thread's two rows

    __device__ __forceinline__ Adjusted(const Consumer& consumer, const float (&products_)[kCount],
                                        const Bias& bias, int expert, int first_row)
        : products(products_), scales(consumer.scales()) {
      biases[0] = biases[1] = 0.0f;
      if (bias.data != nullptr) {
        biases[0] = consumer.bias_of(bias, expert, first_row + row_of(0));
        biases[1] = consumer.bias_of(bias, expert, first_row + row_of(1));
      }
    }

    __device__ __forceinline__ void operator()(int block, float (&v)[4]) const {
      float2 factors{1.0f, 1.0f};
      if (Traits::kGathers) {
        factors = ptx::load_shared_float2(scales + (8 * block + lane_index() % 4 * 2) * 4);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] = fmaf(products[4 * block + e], e % 2 == 0 ? factors.x : factors.y, biases[e / 2]);
      }
    }
  };

  // Stores one half of what has no gate, and first, if wanted, what the activation is applied to.
  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_half(const Tile& tile, const float (&half)[kTokens / 2],
                                              int row, int* sent) const {
    const Adjusted<kTokens / 2> z(*this, half, params.bias[0], tile.expert, row);
    if (Traits::kGathers && params.pre_activated != 0) {
      store<kTokens>(tile, params.pre_activation[0], row, sent, z);
    }
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
      z(block, v);
      if constexpr (kCurve != kIdentity) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = activate<kCurve>(params, cut(v[e], params.limit));
      }
    });
  }

  // Stores the activation of the first half times the second.
  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_gated(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    const Adjusted<kTokens / 2> gate(*this, products.first, params.bias[0], tile.expert, row);
    const Adjusted<kTokens / 2> up(*this, products.second, params.bias[1], tile.expert, row);
    if (params.pre_activated != 0) {
      store<kTokens>(tile, params.pre_activation[0], row, sent, gate);
      store<kTokens>(tile, params.pre_activation[1], row, sent, up);
    }
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
      float factors[4];
      gate(block, v);
      up(block, factors);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] = activate<kCurve>(params, cut_above(v[e], params.limit)) *
               (cut(factors[e], params.limit) + params.up_offset);
      }
    });
  }

  // The same for SiLU and products that need no adjustment.
  template <int kTokens>
  __device__ __forceinline__ void finish_plain(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        // One reciprocal for two: the MUFU unit is what takes longest here.
        const float z0 = products.first[4 * block + e];
        const float z1 = products.first[4 * block + e + 1];
        const float d0 = sigmoid_divisor(z0);
        const float d1 = sigmoid_divisor(z1);
        const float inverse = reciprocal(d0 * d1);
        v[e] = z0 * products.second[4 * block + e] * (inverse * d1);
        v[e + 1] = z1 * products.second[4 * block + e + 1] * (inverse * d0);
      }
    });
  }

  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_curve(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    if constexpr (Traits::kGated) {
      finish_gated<kCurve, kTokens>(tile, products, row, sent);
    } else {
      finish_half<kCurve, kTokens>(tile, products.first, row, sent);
      finish_half<kCurve, kTokens>(tile, products.second, row + Traits::kHalfRows, sent);
    }
  }

  // What becomes of a tile's products.
  template <int kTokens>
  __device__ __forceinline__ void finish(const Tile& tile, Products<kTokens>& products) {
    if (Traits::kInterleaved) take_apart(products);
    // Of this group's rows of the first half.
    const int row = tile.row_tile * Traits::kOutRows + rows_before();
    if (Traits::kGathers) sent = 0;
    if constexpr (!Traits::kGathers) {
      finish_curve<kIdentity, kTokens>(tile, products, row, &sent);
    } else if constexpr (Traits::kPlain) {
      finish_plain<kTokens>(tile, products, row, &sent);
    } else {
      load_scales(tile);
      if (params.curve == kSwish) {
        finish_curve<kSwish, kTokens>(tile, products, row, &sent);
      } else if (params.curve == kGeluErf) {
        finish_curve<kGeluErf, kTokens>(tile, products, row, &sent);
      } else {
        finish_curve<kRelu, kTokens>(tile, products, row, &sent);
      }
    }
  }

  template <int kUnits>
  __device__ __forceinline__ void compute(const Tile& tile) {
    Products<kUnits * kUnitTokens> products;
    multiply(products);
    finish(tile, products);
  }

  // The same where weights are kept.
  template <int kUnits>
  __device__ __forceinline__ void compute_kept(int units, const Tile& tile, const Kept& kept) {
    if constexpr (kUnits < Traits::kTileUnits) {
      if (units > kUnits) {
        compute_kept<kUnits + Traits::kUnitSteps>(units, tile, kept);
        return;
      }
    }
    constexpr int kTokens = kUnits * kUnitTokens;
    float products[kTokens / 2];
    multiply_kept<kTokens>(products, kept);
    finish_half<kIdentity, kTokens>(tile, products,
                                    tile.row_tile * Traits::kOutRows + rows_before(), &sent);
  }

  // `run` where weights are kept: both consumers have every tile, each its own 64 rows.
  __device__ __forceinline__ void run_kept() {
    Kept kept;
    if (group == 1) ptx::named_barrier_arrive(kTurnBarrier, 2 * kThreadsPerGroup);
    for (int number = 0;; ++number) {
      const int slot = number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), number / Traits::kTileSlots % 2);
      const int units = uniform(shared.tiles[slot].units);
      if (units == 0) break;
      pipe.stage = uniform(pipe.stage);
      if (uniform(shared.tiles[slot].edge) != 0) keep(&kept);
      compute_kept<Traits::kUnitSteps>(units, shared.tiles[slot], kept);
    }
    // Nobody else takes the turn that the last tile's products left.
    if (group == 0) ptx::named_barrier_sync(kTurnBarrier, 2 * kThreadsPerGroup);
    wait_sent();
  }

  // Computes a tile that is at most so many units wide, the least that there is code for.
  template <int kUnits>
  __device__ __forceinline__ void compute_within(int units, const Tile& tile) {
    if constexpr (kUnits < Traits::kTileUnits) {
      if (units > kUnits) {
        compute_within<kUnits + Traits::kUnitSteps>(units, tile);
        return;
      }
    }
    compute<kUnits>(tile);
  }

  __device__ __forceinline__ void run() {
    const int steps = ceil_div<Traits::kStep>(params.columns);
    const int stride = Traits::kAlternates ? kConsumers : 1;
    int number = Traits::kAlternates ? group : 0;  // of the tile
    if (Traits::kAlternates && group == 1) {
      pipe.advance(steps);
      ptx::named_barrier_arrive(kTurnBarrier, 2 * kThreadsPerGroup);
    }
    for (;; number += stride) {
      const int slot = number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), number / Traits::kTileSlots % 2);
      const int units = uniform(shared.tiles[slot].units);
      if (units == 0) break;
      pipe.stage = uniform(pipe.stage);
      if (!Traits::kAlternates && steps <= kAnnounceStep && held != kNone) announce();
      compute_within<Traits::kUnitSteps>(units, shared.tiles[slot]);
      if (Traits::kAlternates) pipe.advance(steps);
    }
    // Nobody else takes the turn that the last tile's products left.
    if (Traits::kAlternates && shared.tiles[number % Traits::kTileSlots].edge != 0) {
      ptx::named_barrier_sync(kTurnBarrier + group, 2 * kThreadsPerGroup);
    }
    if (!Traits::kAlternates && held != kNone) {
      announce();
    } else if (warp_of_group() == 0 && lane_index() == 0) {
      ptx::tma_store_wait();
    }
    __syncwarp();
  }
};

template <class Traits>
__device__ __forceinline__ void consume(const Params& params, const Shared<Traits>& shared,
                                        int group) {
  ptx::take_registers<Traits::kConsumerRegisters>();
  if (Traits::kGathers) {
    // No thread but this one lets `down` begin. The second consumer announces nothing before it has
    // waited for the first one (kLagBarrier), and so for this.
    if (threadIdx.x == kThreadsPerGroup) {
      begin_progress(params);
      ptx::launch_dependents();
    }
    __syncwarp();
  } else if (params.progress == nullptr) {
    ptx::wait_for_dependencies();
  }
  Consumer<Traits> consumer(params, shared, group);
  if constexpr (Traits::kKeeps) {
    consumer.run_kept();
  } else {
    consumer.run();
  }
}

template <class Traits>
__device__ __forceinline__ void load(const Params& params, const Shared<Traits>& shared, int warp) {
  ptx::give_registers_back<Traits::kProducerRegisters>();
  if (warp == 0) {
    if constexpr (Traits::kKeeps) {
      produce_runs<Traits>(params, shared);
    } else {
      produce<Traits>(params, shared);
    }
  } else if constexpr (Traits::kGathers) {
    gather<Traits>(params, shared, static_cast<int>(threadIdx.x) - kThreadsPerWarp);
  } else {
    if constexpr (Traits::kKeeps) {
      if (warp <= kConsumers) {
        Consumer<Traits>(params, shared, warp - 1).send_all();
        return;
      }
    }
    // Of a layer's `down` no others wait for all of `up`: it does not end before that, nor lets the
    // next kernel begin.
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    grouped_product_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(kSharedAlignment) unsigned char raw[];
  const Shared<Traits> shared{static_cast<uint32_t>(__cvta_generic_to_shared(raw)),
                              reinterpret_cast<Tile*>(raw + Traits::kTilesOffset)};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    // That read a stage.
    constexpr int kConsumerWarps = Traits::kAlternates ? 4 : 4 * kConsumers;
    ptx::prefetch_tensor_map(&params.weights[0]);
    ptx::prefetch_tensor_map(&params.weights[1]);
    ptx::prefetch_tensor_map(&params.out[0]);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1 + (Traits::kGathers ? Traits::kGatherThreads : 0));
      ptx::mbarrier_init(shared.empty(stage), kCluster * kConsumerWarps);
    }
    for (int slot = 0; slot < Traits::kTileSlots; ++slot) {
      ptx::mbarrier_init(shared.known(slot), 1);
      if (!Traits::kGathers) ptx::mbarrier_init(shared.dealt(slot), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  if (Traits::kGathers) {
    if (thread == 0) fetch_ahead<Traits>(params);
    __syncwarp();
    ptx::wait_for_dependencies();
  }

  const int warp = __shfl_sync(kFullWarp, thread / kThreadsPerWarp, 0);
  // Asked so, and not whether it is 0, ptxas puts the code that loads first: nothing starts without
  // it, and behind other kernels code has to come from the memory.
  if (warp >= 4) {
    consume<Traits>(params, shared, warp / 4 - 1);
  } else {
    load<Traits>(params, shared, warp);
  }
  // The other block of the cluster may still load to this one.
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace flashmoe::moe::sm90
