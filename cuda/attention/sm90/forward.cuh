// Attention forward on sm_90, warp-specialised and persistent.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// A block is one producer warpgroup, of which one thread issues the loads, and two or three
// consumer warpgroups of 64 query rows each. Blocks walk tiles of one head, kTileQ rows at a time,
// keys from the last to the first: masks are all in the first steps. In a step a consumer issues Q
// K^T of this step and P V of the one before, and does the softmax of this step while P V runs;
// consumers take turns in issuing, so that one's softmax also runs under the other's products.
//
// With split KV (Traits::kSplit), for few query rows and many keys, tiles hold the rows of all
// query heads of a KV head, and the steps of all tiles, laid end to end, are dealt to the blocks in
// equal ranges (stream-K). A tile within one range is written out by its block; split_kv.cuh has
// the others.
//
// Short windows have consumers of their own (window.cuh).
#pragma once

#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/row_statistics.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90 {

// What the probabilities of a step that a lane holds of a row may add up to under a maximum from
// before: more, and one of them may be beyond what fp16 holds.
inline constexpr float kMostOfAStep = 16384.0f;
inline constexpr int kOrderBarrier = 1;  // named barriers: one for each consumer
inline constexpr int kStoreBarrier = 5;  // and another

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

// Addresses of the barriers, and which stage and parity a running count of uses means.
template <class Traits>
struct Barriers {
  uint32_t base;

  __device__ __forceinline__ uint32_t k_full(int stage) const { return of(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return of(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return of(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return of(3, stage); }
  __device__ __forceinline__ uint32_t q_full(int stage, int portion) const {
    return of(4, 0) + 8 * (stage * Traits::kQPortions + portion);
  }
  __device__ __forceinline__ uint32_t q_empty(int stage, int portion) const {
    return q_full(Traits::kQStages + stage, portion);
  }
  // Of ragged kernels: slots of the ring of tiles.
  __device__ __forceinline__ uint32_t tile_full(int slot) const {
    return q_full(2 * Traits::kQStages, 0) + 8 * slot;
  }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const {
    return tile_full(Traits::kTileSlots + slot);
  }

 private:
  __device__ __forceinline__ uint32_t of(int kind, int stage) const {
    return base + 8 * (kind * Traits::kStages + stage);
  }
};

// Begins to load the keys or values of the step that begins at a row of the tensor. Those before
// row 0 come as zeros.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_step(const CUtensorMap& map, const Repeats& repeats,
                                          const TileOf<Traits>& tile, int row, uint32_t to,
                                          uint32_t full) {
  ptx::mbarrier_arrive_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::tma_load(to + box * Traits::kKVBoxBytes, &map, full, ptx::kEvictLast, box * kBoxColumns,
                  row, tile.head_kv * repeats.head, tile.batch * repeats.batch);
  }
}

// Begins to load the rows of a portion's groups, as far as these have any, for each query those of
// all its packed heads.
template <class Traits>
__device__ __forceinline__ void load_packed_q(const SplitParams& params, const TilePart& tile,
                                              int portion, uint32_t to, uint32_t full) {
  const int begin = portion * Traits::kGroupsPerPortion;
  const int end = min(begin + Traits::kGroupsPerPortion, params.groups_per_tile);
  const int rows = params.queries_per_group * params.packed_heads;
  const int first_row = sequence_of(params, tile.batch).begin_q + tile.first_row;
  ptx::mbarrier_arrive_expect(full, max(0, end - begin) * Traits::kBoxes * rows * kBoxRowBytes);
#pragma unroll 1
  for (int group = begin; group < end; ++group) {
#pragma unroll 1
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::tma_load(to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes, &params.q,
                    full, ptx::kEvictFirst, box * kBoxColumns, tile.head * params.q_repeats.head,
                    first_row + group * params.queries_per_group,
                    tile.head_kv * params.q_repeats.head, tile.batch * params.q_repeats.batch);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void produce(const ParamsOf<Traits>& params, uint32_t shared,
                                        TileOf<Traits>* tiles, const Barriers<Traits>& barriers) {
  using Tile = TileOf<Traits>;
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kStages> v_pipe;
  PipelineState<Traits::kQStages> q_pipe;
  const auto row_of = [&](const Tile& tile, int key) {
    return sequence_of(params, tile.batch).begin_k + key;
  };
  const auto load_k = [&](const Tile& tile, int key) {
    const uint32_t full = barriers.k_full(k_pipe.stage);
    const uint32_t to = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
    ptx::mbarrier_wait(barriers.k_empty(k_pipe.stage), k_pipe.parity ^ 1);
    load_step<Traits, Traits::kBoxes>(params.k, params.k_repeats, tile, row_of(tile, key), to,
                                      full);
    k_pipe.advance();
  };
  const auto load_v = [&](const Tile& tile, int key) {
    const uint32_t full = barriers.v_full(v_pipe.stage);
    const uint32_t to = shared + Traits::kVOffset + v_pipe.stage * Traits::kVBytes;
    ptx::mbarrier_wait(barriers.v_empty(v_pipe.stage), v_pipe.parity ^ 1);
    load_step<Traits, Traits::kBoxesV>(params.v, params.v_repeats, tile, row_of(tile, key), to,
                                       full);
    v_pipe.advance();
  };
  const auto load_q = [&](const Tile& tile, int portion) {
    constexpr int kGroups = Traits::kGroupsPerPortion;
    const uint32_t full = barriers.q_full(q_pipe.stage, portion);
    const uint32_t to = shared + Traits::kQOffset + q_pipe.stage * Traits::kQBytes;
    if constexpr (Traits::kSplit) {
      load_packed_q<Traits>(params, tile, portion, to, full);
    } else {
      const int first_row = sequence_of(params, tile.batch).begin_q + tile.first_row;
      ptx::mbarrier_arrive_expect(full, kGroups * Traits::kQBytesPerGroup);
#pragma unroll
      for (int i = 0; i < kGroups * Traits::kBoxes; ++i) {
        const int group = portion * kGroups + i / Traits::kBoxes;
        const int box = i % Traits::kBoxes;
        ptx::tma_load(to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes, &params.q,
                      full, ptx::kEvictFirst, box * kBoxColumns, first_row + group * kRowsPerGroup,
                      tile.head * params.q_repeats.head, tile.batch * params.q_repeats.batch);
      }
    }
  };
  // Waits until a portion of Q is free for the next tile.
  const auto wait_for_room = [&](int portion) {
    ptx::mbarrier_wait(barriers.q_empty(q_pipe.stage, portion), q_pipe.parity ^ 1);
  };
  // In the order of use: V of a step after K of the next, be that another tile's. Where there is
  // one Q, it waits longer than K.
  SchedulerOf<Traits> scheduler(params);
  Tile last_tile;
  int last_key = 0;
  bool pending = false;  // V of last_tile's last step
  uint32_t sent = 0;
  const auto load_pending = [&] {
    if (pending) load_v(last_tile, last_key);
    pending = false;
  };
  for (Tile tile; scheduler.next(&tile);) {
    const Steps<Traits> steps = steps_of_tile<Traits>(params, tile);
    const bool any = steps.end > 0;
    const int begin = steps.end - Traits::kStepKeys;
    if (Traits::kQStages == 1 && any) load_k(tile, begin);
#pragma unroll
    for (int portion = 0; portion < Traits::kQPortions; ++portion) {
      wait_for_room(portion);
      if (portion == 0) tiles[sent++ % Traits::kTileSlots] = tile;
      load_q(tile, portion);
    }
    q_pipe.advance();
    if (Traits::kQStages > 1 && any) load_k(tile, begin);
    load_pending();
    for (int key = begin; key > steps.first; key -= Traits::kStepKeys) {
      load_k(tile, key - Traits::kStepKeys);
      load_v(tile, key);
    }
    pending = any;
    last_tile = tile;
    last_key = steps.first;
  }
  load_pending();
#pragma unroll
  for (int portion = 0; portion < Traits::kQPortions; ++portion) {
    wait_for_room(portion);
    if (portion == 0) tiles[sent % Traits::kTileSlots].first_row = kNoTile;
    ptx::mbarrier_arrive(barriers.q_full(q_pipe.stage, portion));
  }
}

// ---- loads of sequences
// ------------------------------------------------------------------------------
//
// By two threads, of which one alone would have too few registers for what these loads are told:
// one of Q and K, one of V.

// Loads the keys or values of the step that begins at a key, once there is room for them. Those
// that the sequence does not have come as zeros. What lies in shared memory is read before: behind
// the wait the room would be empty meanwhile.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_ragged_step(const CUtensorMap& map, const Repeats& repeats,
                                                 int rows_per_batch, const RaggedTile& tile,
                                                 int key, uint32_t to, uint32_t full,
                                                 uint32_t empty, uint32_t parity) {
  const RaggedRow row = RaggedRow::at(key, tile.sequence.begin_k + tile.batch_k * rows_per_batch,
                                      tile.sequence.length_k);
  const int head = tile.head_kv * repeats.head;
  ptx::mbarrier_wait(empty, parity);
  ptx::mbarrier_arrive_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::tma_load(to + box * Traits::kKVBoxBytes, &map, full, ptx::kEvictLast, box * kBoxColumns,
                  row.row, head, row.base, row.wrap);
  }
}

// The tile as a group has it, by that of group 0: they differ in their rows and heads alone.
template <class Traits, class Tile>
__device__ __forceinline__ Tile& tile_of_group(Tile& tile, int group) {
  return Traits::kPacksHeads ? (&tile)[group * Traits::kTileSlots] : tile;
}

// Rows of a step of paged keys that are one behind the other in a page, and the page: where there
// is none, one outside of the map, from which zeros come.
template <class Traits>
struct PagedRows {
  PagePiece piece;
  int page;

  static __device__ __forceinline__ PagedRows at(const RaggedParams& params, const Repeats& repeats,
                                                 RaggedTile& tile, int key, int end) {
    constexpr int kNowhere = -1;
    const KeyTables& tables = params.sequences.keys;
    PagedRows rows = {
        PagePiece::at(tables.by_page_size, key, end, tile.sequence.begin_k, tile.sequence.length_k),
        kNowhere};
    if (rows.piece.page >= 0) {
      rows.page = tables.page_at(tables.pages_of(tile.batch_k), rows.piece.page);
      if (rows.page < 0) {
#pragma unroll
        for (int ring = 0; ring < Traits::kTileRings; ++ring) {
          tile_of_group<Traits>(tile, ring).misses_pages = 1;
        }
      }
      if (rows.page > 0) rows.page *= repeats.batch;
    }
    return rows;
  }
};

// Begins to load the rows of pages that a step is made of, one piece after another: those that
// there are not, before key 0, behind the last or of a page that is none, come as zeros from
// outside the map. Pieces are cut into boxes of powers of two rows, which need not begin with a
// whole swizzle. A piece's page is read before the piece in front of it is sent for, and that of
// the first before there is room for the step: what waits for room then waits for no table.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_paged_step(const RaggedParams& params,
                                                const CUtensorMap (&maps)[kPageBoxes],
                                                const Repeats& repeats, RaggedTile& tile, int key,
                                                uint32_t to, uint32_t full, uint32_t empty,
                                                uint32_t parity) {
  static_assert(Traits::kStepKeys < 1 << kPageBoxes);
  const int end = key + Traits::kStepKeys;
  PagedRows<Traits> next = PagedRows<Traits>::at(params, repeats, tile, key, end);
  ptx::mbarrier_wait(empty, parity);
  ptx::mbarrier_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll 1
  while (true) {
    PagePiece piece = next.piece;
    const int page = next.page;
    key += piece.rows;
    const bool more = key < end;
    if (more) next = PagedRows<Traits>::at(params, repeats, tile, key, end);
#pragma unroll 1
    while (piece.rows > 0) {
      const int size = 31 - __clz(piece.rows);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        ptx::tma_load(to + box * Traits::kKVBoxBytes, &maps[size], full, ptx::kEvictLast,
                      box * kBoxColumns, piece.row, tile.head_kv * repeats.head, page);
      }
      to += kBoxRowBytes << size;
      piece.row += 1 << size;
      piece.rows -= 1 << size;
    }
    if (!more) break;
  }
  // Behind what was said of the tile.
  ptx::mbarrier_arrive(full);
}

// Of a box that begins at a row of the tile's sequence, in q or out.
__device__ __forceinline__ RaggedRow query_box(const RaggedParams& params, const RaggedTile& tile,
                                               int rows_per_batch, int row) {
  const int begin = tile.sequence.begin_q + tile.batch * rows_per_batch;
  if (params.heads_per_tile > 1) return RaggedRow::of_heads(row, begin);
  return RaggedRow::at(row, begin, tile.sequence.length_q);
}

// Loads the rows of a portion's groups, once there is room for them. Where the first are is known
// before: kernels of one Q, which wait longest for it, have a portion for each group.
template <class Traits, class Wait>
__device__ __forceinline__ void load_ragged_q(const RaggedParams& params, const RaggedTile& tile,
                                              int portion, uint32_t to, uint32_t full,
                                              const Wait& wait_for_room) {
  const int begin = portion * Traits::kGroupsPerPortion;
  const int end = begin + Traits::kGroupsPerPortion;
  const auto row_of = [&](int group) {
    const RaggedTile& own = tile_of_group<Traits>(tile, group);
    return query_box(params, own, params.rows_per_batch.q, own.first_row + group * kRowsPerGroup);
  };
  RaggedRow row = row_of(begin);
  wait_for_room();
  ptx::mbarrier_arrive_expect(full, Traits::kGroupsPerPortion * Traits::kQBytesPerGroup);
#pragma unroll 1
  for (int group = begin;; row = row_of(group)) {
#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::tma_load(to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes, &params.q,
                    full, ptx::kEvictFirst, box * kBoxColumns, row.row,
                    tile_of_group<Traits>(tile, group).head * params.q_repeats.head, row.base,
                    row.wrap);
    }
    if (++group == end) break;
  }
}

// The tiles that the scheduling warp leaves in a ring, as one of the threads that load takes them.
template <class Traits>
class RingOfTiles {
 public:
  __device__ __forceinline__ RingOfTiles(RaggedTile* tiles, const Barriers<Traits>& barriers)
      : tiles_(tiles), barriers_(barriers) {}

  // The next, until one has kNoTile.
  __device__ __forceinline__ RaggedTile& next() {
    slot_ = number_ % Traits::kTileSlots;
    ptx::mbarrier_wait(barriers_.tile_full(slot_), number_ / Traits::kTileSlots % 2);
    ++number_;
    return tiles_[slot_];
  }

  // Says that the tile so many before the last was, which in a ring is the one that will be so many
  // behind it, is no longer needed.
  __device__ __forceinline__ void empty_one(int tiles_ahead) const {
    static_assert(kTilesInFlight + kTilesAhead == Traits::kTileSlots);
    const auto ahead = static_cast<uint32_t>(tiles_ahead);  // kTilesAhead at most
    ptx::mbarrier_arrive(barriers_.tile_empty((slot_ + ahead) % Traits::kTileSlots));
  }

 private:
  RaggedTile* tiles_;
  const Barriers<Traits>& barriers_;
  uint32_t number_ = 0;
  uint32_t slot_ = 0;
};

template <class Traits>
__device__ __forceinline__ void produce_q_and_k(const RaggedParams& params, uint32_t shared,
                                                RaggedTile* tiles,
                                                const Barriers<Traits>& barriers) {
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kQStages> q_pipe;
  const auto load_k = [&](RaggedTile& tile, int key) {
    const uint32_t to = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
    const uint32_t full = barriers.k_full(k_pipe.stage);
    const uint32_t empty = barriers.k_empty(k_pipe.stage);
    if (params.sequences.paged != 0) {
      load_paged_step<Traits, Traits::kBoxes>(params, params.k_pages, params.k_repeats, tile, key,
                                              to, full, empty, k_pipe.parity ^ 1);
    } else {
      load_ragged_step<Traits, Traits::kBoxes>(params.k, params.k_repeats, params.rows_per_batch.k,
                                               tile, key, to, full, empty, k_pipe.parity ^ 1);
    }
    k_pipe.advance();
  };
  const auto wait_for_room = [&](int portion) {
    ptx::mbarrier_wait(barriers.q_empty(q_pipe.stage, portion), q_pipe.parity ^ 1);
  };
  RingOfTiles<Traits> ring(tiles, barriers);
  for (;;) {
    RaggedTile& tile = ring.next();
    if (tile.first_row == kNoTile) break;
    int key = tile.end_key - Traits::kStepKeys;
    // Where there is one Q, it waits longer than K.
    if (Traits::kQStages == 1 && tile.end_key > 0) {
      load_k(tile, key);
      key -= Traits::kStepKeys;
    }
#pragma unroll
    for (int portion = 0; portion < Traits::kQPortions; ++portion) {
      load_ragged_q<Traits>(
          params, tile, portion, shared + Traits::kQOffset + q_pipe.stage * Traits::kQBytes,
          barriers.q_full(q_pipe.stage, portion), [&] { wait_for_room(portion); });
      // Of the tile kTilesInFlight before it the consumers are done with all.
      if (portion == 0 && key - tile.first_key <= params.keys_before_claim) {
        ring.empty_one(params.tiles_ahead);
      }
    }
    q_pipe.advance();
    for (; key >= tile.first_key; key -= Traits::kStepKeys) {
      load_k(tile, key);
      // Beside decoding no sooner than it has to: whoever is free before takes the next tile.
      if (key - tile.first_key == params.keys_before_claim + Traits::kStepKeys) {
        ring.empty_one(params.tiles_ahead);
      }
    }
  }
#pragma unroll
  for (int portion = 0; portion < Traits::kQPortions; ++portion) {
    wait_for_room(portion);
    ptx::mbarrier_arrive(barriers.q_full(q_pipe.stage, portion));
  }
}

template <class Traits>
__device__ __forceinline__ void produce_v(const RaggedParams& params, uint32_t shared,
                                          RaggedTile* tiles, const Barriers<Traits>& barriers) {
  PipelineState<Traits::kStages> v_pipe;
  RingOfTiles<Traits> ring(tiles, barriers);
  for (;;) {
    RaggedTile& tile = ring.next();
    if (tile.first_row == kNoTile) break;
    ring.empty_one(params.tiles_ahead);
    for (int key = tile.end_key - Traits::kStepKeys; key >= tile.first_key;
         key -= Traits::kStepKeys) {
      const uint32_t to = shared + Traits::kVOffset + v_pipe.stage * Traits::kVBytes;
      const uint32_t full = barriers.v_full(v_pipe.stage);
      const uint32_t empty = barriers.v_empty(v_pipe.stage);
      if (params.sequences.paged != 0) {
        load_paged_step<Traits, Traits::kBoxesV>(params, params.v_pages, params.v_repeats, tile,
                                                 key, to, full, empty, v_pipe.parity ^ 1);
      } else {
        load_ragged_step<Traits, Traits::kBoxesV>(params.v, params.v_repeats,
                                                  params.rows_per_batch.v, tile, key, to, full,
                                                  empty, v_pipe.parity ^ 1);
      }
      v_pipe.advance();
    }
  }
}

// Finds this block's tiles of a batch of sequences; a whole warp. The first tiles find their slots
// empty. With each tile that is then begun to be loaded, or nearly is loaded, the slot of the tile
// so many behind it is emptied.
template <class Traits, Tiles kTiles>
__device__ __forceinline__ void schedule(const RaggedParams& params, RaggedTile* tiles,
                                         ChunkSequence* chunk, const Barriers<Traits>& barriers) {
  RaggedScheduler<Traits, kTiles> scheduler(params, chunk);
  const auto ahead = static_cast<uint32_t>(params.tiles_ahead);
  uint32_t number = 0;
  for (bool more = true; more; ++number) {
    const uint32_t slot = number % Traits::kTileSlots;
    const uint32_t emptied = (number + Traits::kTileSlots - ahead) / Traits::kTileSlots;
    ptx::mbarrier_wait(barriers.tile_empty(slot), (emptied & 1) ^ 1);
    more = scheduler.next();
    if (const int group = lane_index(); group < Traits::kTileRings) {
      RaggedTile& tile = tile_of_group<Traits>(tiles[slot], group);
      if (more) {
        scheduler.describe(&tile, group);
      } else {
        tile.first_row = kNoTile;
      }
    }
    __syncwarp();
    pin(number);  // for the slot to be found again, which there is no register for meanwhile
    if (lane_index() == 0) ptx::mbarrier_arrive(barriers.tile_full(number % Traits::kTileSlots));
  }
}

// What the warps of the producer's warpgroup do.
template <class Traits>
__device__ __forceinline__ void produce_ragged(const RaggedParams& params, uint32_t shared,
                                               RaggedTile* tiles, ChunkSequence* chunk,
                                               const Barriers<Traits>& barriers) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) produce_q_and_k<Traits>(params, shared, tiles, barriers);
  if (thread / kThreadsPerWarp == 1) {
    if (params.division == nullptr) {
      schedule<Traits, Tiles::kDealt>(params, tiles, chunk, barriers);
    } else {
      schedule<Traits, Tiles::kTaken>(params, tiles, chunk, barriers);
    }
  }
  if (thread == 2 * kThreadsPerWarp) produce_v<Traits>(params, shared, tiles, barriers);
  // Beside decoding no others wait for it: this kernel does not end before it, nor lets the next
  // one begin.
  if (thread / kThreadsPerWarp == 3 && params.division != nullptr) {
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }
}

// Of a lane's two rows, lane / 4 and eight on.
struct Statistics : RowStatistics<2> {
  // Of the lanes of a row one counts what it begins with.
  __device__ __forceinline__ void reset(const RowState& begin) {
    RowStatistics<2>::reset({begin.row_max, lane_index() % 4 == 0 ? begin.sum : 0.0f});
  }

  // Turns scores into probabilities, whose sums go to `step`.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float scale_log2,
                                               float (&step)[2]) const {
    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = (i / 2) % 2;
      scores[i] = probability(scores[i], scale_log2, row_max[half]);
      sums[half][i % 2] += scores[i];
    }
    step[0] = sums[0][0] + sums[0][1];
    step[1] = sums[1][0] + sums[1][1];
  }

  __device__ __forceinline__ void add(const float (&step)[2]) {
    sum[0] += step[0];
    sum[1] += step[1];
  }

  // Whether the maxima are too low for probabilities with these sums. A row whose maximum is NaN
  // stays as it is.
  __device__ __forceinline__ bool outgrown(const float (&step)[2]) const {
    return (!(step[0] <= kMostOfAStep) && row_max[0] == row_max[0]) ||
           (!(step[1] <= kMostOfAStep) && row_max[1] == row_max[1]);
  }
};

// Computes a row of the output anew, by a warp.
template <class Traits>
__device__ __forceinline__ void compute_again(const Params& params, int batch, int head,
                                              int head_kv, int query) {
  const Sequence sequence = sequence_of(params, batch);
  const KeyRange keys = {sequence.first_key(params.score, query),
                         sequence.end_key(params.score, query)};
  masked_row_fallback<typename Traits::Element, Traits::kDimV>(
      params.tensors, params.score,
      {batch, head, head_kv, sequence.begin_q + query, sequence.rows_of(keys)});
}

// Where the keys of a sequence and their values are: nullptr for those of a page that is none.
struct RaggedKeys {
  const RaggedParams& params;
  const RaggedTile& tile;

  __device__ __forceinline__ const uint16_t* k(int key) const {
    return row_of(params.tensors.k, params.tensors.k_strides, key);
  }
  __device__ __forceinline__ const uint16_t* v(int key) const {
    return row_of(params.tensors.v, params.tensors.v_strides, key);
  }

  // Whether a page of these keys is none; a whole warp.
  __device__ __forceinline__ bool misses(const KeyRange& keys) const {
    if (params.sequences.paged == 0 || keys.first >= keys.end) return false;
    const KeyTables& tables = params.sequences.keys;
    const int32_t* const pages = tables.pages_of(tile.batch_k);
    const int last = tables.by_page_size.quotient(tile.sequence.begin_k + keys.end - 1);
    bool missing = false;
    for (int page = tables.by_page_size.quotient(tile.sequence.begin_k + keys.first) + lane_index();
         page <= last; page += kThreadsPerWarp) {
      missing = missing || tables.page_at(pages, page) < 0;
    }
    return __any_sync(kFullWarp, missing);
  }

 private:
  __device__ __forceinline__ const uint16_t* row_of(const uint16_t* data, const RowStrides& strides,
                                                    int key) const {
    const int row = tile.sequence.begin_k + key;
    KeyTables::Place place = {tile.batch_k, row};
    if (params.sequences.paged != 0) {
      const KeyTables& tables = params.sequences.keys;
      place = tables.place_of(tables.pages_of(tile.batch_k), row);
      if (place.batch < 0) return nullptr;
    }
    return data +
           (place.batch * strides.batch + tile.head_kv * strides.head + place.row * strides.seq);
  }
};

template <class Traits>
__device__ __forceinline__ void compute_again(const RaggedParams& params, const RaggedTile& tile,
                                              int query) {
  const Sequence& sequence = tile.sequence;
  const KeyRange keys = {sequence.first_key(params.score, query),
                         sequence.end_key(params.score, query)};
  const PlaceOfRow place = PlaceOfRow::of(params, tile, query);
  masked_row_fallback<typename Traits::Element, Traits::kDimV>(
      params.tensors, params.score, {tile.batch, place.head, tile.head_kv, place.position, keys},
      [](int) { return true; }, RaggedKeys{params, tile});
}

// The state of a consumer warpgroup.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using ValueMma = ptx::Wgmma<Element, Traits::kDimV>;
  using Params = ParamsOf<Traits>;
  using Tile = TileOf<Traits>;
  using Fragments = GroupScoreFragments<Traits::kStepKeys>;
  static constexpr int kScores = Traits::kStepKeys / 2;
  static constexpr int kOutputs = Traits::kDimV / 2;
  static constexpr int kSlices = Traits::kStepKeys / 16;

  const Params& params;
  Barriers<Traits> barriers;
  uint32_t shared;
  const Tile* tiles;  // [Traits::kTileSlots]
  int group;
  uint64_t q_descriptor;
  uint64_t k_descriptor;
  uint64_t v_descriptor;
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kStages> v_pipe;
  PipelineState<Traits::kQStages> q_pipe;

  uint32_t tile = 0;  // running count: the tile that steps belong to
  bool open = false;  // the last P V of the tile before it, or of it, is still to be done
  Statistics statistics;
  float scores[kScores];
  uint32_t p[kSlices][4];
  float out[kOutputs];
  bool add = false;  // out holds something
  // This warp has written rows that need the fallback. They hold an infinity or a NaN.
  bool suspect = false;

  __device__ __forceinline__ Consumer(const Params& params_, const Barriers<Traits>& barriers_,
                                      uint32_t shared_, const Tile* tiles_, int group_)
      : params(params_), barriers(barriers_), shared(shared_), tiles(tiles_), group(group_) {
    q_descriptor =
        ptx::swizzled_descriptor(shared + Traits::kQOffset + group * Traits::kQBytesPerGroup, 16);
    k_descriptor = ptx::swizzled_descriptor(shared + Traits::kKOffset, 16);
    v_descriptor = ptx::swizzled_descriptor(shared + Traits::kVOffset, Traits::kKVBoxBytes);
  }

  // Of the tile that steps belong to.
  __device__ __forceinline__ SequenceOf<Traits> sequence() const {
    return sequence_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots]);
  }

  // What its rows begin with. Where keys are split, sinks are added at a row's end.
  __device__ __forceinline__ RowState begin() const {
    if constexpr (Traits::kSplit) {
      return {kNoRowMax, 0.0f};
    } else {
      return tiles[tile % Traits::kTileSlots].begin;
    }
  }

  // Of Q. Kernels of sequences and of short windows count tiles alone, having a register less than
  // others.
  static constexpr bool kCountsTiles = Traits::kRagged || Traits::kWindowSteps > 0;
  __device__ __forceinline__ int q_stage() const {
    return kCountsTiles ? static_cast<int>(tile % Traits::kQStages) : q_pipe.stage;
  }
  __device__ __forceinline__ uint32_t q_parity() const {
    return kCountsTiles ? tile / Traits::kQStages % 2 : q_pipe.parity;
  }

  // Of Q: the one that holds this group's rows.
  __device__ __forceinline__ int portion() const { return group / Traits::kGroupsPerPortion; }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (ptx::elect_one()) ptx::mbarrier_arrive(barrier);
  }

  // Issues scores = Q K^T, of the first kKeys keys of a step.
  template <int kKeys>
  __device__ __forceinline__ void issue_scores(float (&of_keys)[kKeys / 2]) {
    const uint64_t q = ptx::advance(q_descriptor, q_stage() * Traits::kQBytes);
    const uint64_t k = ptx::advance(k_descriptor, k_pipe.stage * Traits::kKBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
      const int box = slice / 4;
      const int within = slice % 4 * 32;
      ptx::Wgmma<Element, kKeys>::multiply(
          of_keys, ptx::advance(q, box * Traits::kRowBoxBytes + within),
          ptx::advance(k, box * Traits::kKVBoxBytes + within), slice > 0);
    }
    ptx::wgmma_commit();
  }

  // Issues out += P V of a stage, or out = P V.
  __device__ __forceinline__ void issue_values(const uint32_t (&p_of_step)[kSlices][4], int stage,
                                               bool add_up) {
    const uint64_t v = ptx::advance(v_descriptor, stage * Traits::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ValueMma::multiply_values(out, p_of_step[slice], ptx::advance(v, slice * 2048),
                                slice > 0 || add_up);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_values() {
    issue_values(p, v_pipe.stage, add);
    add = true;
  }

  static __device__ __forceinline__ void pack(const float (&scores)[kScores],
                                              uint32_t (&p)[kSlices][4]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        p[slice][r] = Numeric::pack(scores[8 * slice + 2 * r], scores[8 * slice + 2 * r + 1]);
      }
    }
  }

  // Of this thread's keys of a step, 2 (lane % 4) + 8 i and the one behind it, as many as lie
  // before `end`, as the lowest bits.
  static __device__ __forceinline__ uint32_t keys_before(int end, int lane) {
    const int within = max(0, end - 2 * (lane % 4));
    const int keys = within / 8 * 2 + min(within % 8, 2);
    return keys >= 32 ? ~0u : (1u << keys) - 1;
  }

  // Hides the keys of the step from `key` on that a row does not see.
  __device__ __forceinline__ void mask(int group_row, int key, float (&scores)[kScores]) const {
    static_assert(kScores / 2 <= 32, "a bit for each key of a row");
    const int lane = lane_index();
    const int first_row = warp_of_group() * 16 + lane / 4;
    mask_scores<Fragments>(scores, [&](int half) {
      const int row = query_of<Traits>(params, group_row, first_row + 8 * half);
      const uint32_t seen = keys_before(sequence().end_key(params.score, row) - key, lane) &
                            ~keys_before(sequence().first_key(params.score, row) - key, lane);
      return [seen](int i) { return (seen & (1u << i)) != 0; };
    });
  }

  // What softcap and mask make of Q K^T.
  __device__ __forceinline__ void cap_and_mask(int group_row, int key, bool masked) {
    if constexpr (Traits::kCapped) params.score.template cap<Softcap::kBrief>(scores);
    if (masked) mask(group_row, key, scores);
  }

  __device__ __forceinline__ void take_turn() const {
    if (Traits::kOrdered) {
      ptx::named_barrier_sync(kOrderBarrier + group, 2 * kThreadsPerGroup);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Traits::kOrdered) {
      const int next = group + 1 == Traits::kConsumers ? 0 : group + 1;
      ptx::named_barrier_arrive(kOrderBarrier + next, 2 * kThreadsPerGroup);
    }
  }

  __device__ __forceinline__ void wait_for_k() const {
    ptx::mbarrier_wait(barriers.k_full(k_pipe.stage), k_pipe.parity);
  }
  __device__ __forceinline__ void wait_for_v() const {
    ptx::mbarrier_wait(barriers.v_full(v_pipe.stage), v_pipe.parity);
  }
  __device__ __forceinline__ void release_k() {
    release(barriers.k_empty(k_pipe.stage));
    k_pipe.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(barriers.v_empty(v_pipe.stage));
    v_pipe.advance();
  }
  __device__ __forceinline__ void release_q() { release(barriers.q_empty(q_stage(), portion())); }

  // Computes the scores of this warp's rows again, in a warp alone.
  __device__ __forceinline__ void compute_scores_again() {
    const int lane = lane_index();
    const int q_row = warp_of_group() * 16 + lane % 16;
    const int k_row = lane / 16 * 8 + lane % 8;
    const uint32_t q =
        shared + Traits::kQOffset + q_stage() * Traits::kQBytes + group * Traits::kQBytesPerGroup;
    const uint32_t k = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
      const int box = slice / 4;
      const int chunk = slice % 4 * 2;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, q + box * Traits::kRowBoxBytes + q_row * kBoxRowBytes +
                              ((chunk + lane / 16) ^ (q_row % 8)) * 16);
#pragma unroll
      for (int keys = 0; keys < Traits::kStepKeys / 16; ++keys) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k + box * Traits::kKVBoxBytes + (16 * keys + k_row) * kBoxRowBytes +
                                ((chunk + lane / 8 % 2) ^ (k_row % 8)) * 16);
#pragma unroll
        for (int tile8 = 0; tile8 < 2; ++tile8) {
          float d[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) d[i] = scores[8 * keys + 4 * tile8 + i];
          ptx::mma_m16n8k16<Element>(d, a, b[2 * tile8], b[2 * tile8 + 1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[8 * keys + 4 * tile8 + i] = d[i];
        }
      }
    }
  }

  // Waits for P V. ptxas would have this wait before the exponentials, which should run under P V:
  // it does not move across a branch that depends on all of them, through their sums, and is never
  // taken.
  __device__ __forceinline__ void wait_for_values(const float (&sums)[2]) {
    if (__any_sync(kFullWarp, sums[0] + sums[1] < 0.0f)) __trap();
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
  }

  // Q K^T of the first kKeys keys of a tile's first step, of which no row of the group sees more,
  // and with kClose the last P V of the tile before it. Who calls chooses kKeys by a branch around
  // all of the step's products: one between them makes ptxas serialise them.
  template <bool kClose, int kKeys>
  __device__ __forceinline__ void first_products() {
    float of_keys[kKeys / 2];
    issue_scores<kKeys>(of_keys);
    if (kClose) {
      wait_for_v();
      issue_values();
    }
    pass_turn();
    ptx::wgmma_wait<kClose ? 1 : 0>();
    ptx::pin(of_keys);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = i < kKeys / 2 ? of_keys[i] : -INFINITY;
  }

  // The first step of a tile. With kClose, the last P V of the tile before it runs under the
  // softmax, and that tile is written out.
  template <bool kClose>
  __device__ __forceinline__ void first_step(int group_row, int key, bool masked, bool last,
                                             bool narrow) {
    wait_for_k();
    take_turn();
    if (kClose) ptx::pin(out);
    if (narrow) {
      first_products<kClose, Traits::kNarrowKeys>();
    } else {
      first_products<kClose, Traits::kStepKeys>();
    }
    release_k();
    if (last) release_q();
    const Statistics closing = statistics;
    float factor[2];
    float sums[2];
    cap_and_mask(group_row, key, masked);
    statistics.reset(begin());
    statistics.rescale_nan<Fragments>(scores, params.score.scale_log2, factor);
    statistics.exponentiate(scores, params.score.scale_log2, sums);
    statistics.add(sums);
    if (kClose) {
      wait_for_values(sums);
      end_tile(tile - 1, closing);
    }
    pack(scores, p);
    open = true;
  }

  // Q K^T of a step, P V of the one before, and the softmax of this one under it. Row maxima are
  // taken to hold; the sums show where they do not, and the scores are computed again then.
  __device__ __forceinline__ void next_step(int group_row, int key, bool masked, bool last) {
    wait_for_k();
    take_turn();
    ptx::pin(scores);
    ptx::pin(out);
    issue_scores<Traits::kStepKeys>(scores);
    wait_for_v();
    issue_values();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    float sums[2];
    cap_and_mask(group_row, key, masked);
    statistics.exponentiate(scores, params.score.scale_log2, sums);
    wait_for_values(sums);
    if (__builtin_expect(__any_sync(kFullWarp, statistics.outgrown(sums)), false)) {
      float factor[2];
      compute_scores_again();
      cap_and_mask(group_row, key, masked);
      statistics.rescale_nan<Fragments>(scores, params.score.scale_log2, factor);
      statistics.exponentiate(scores, params.score.scale_log2, sums);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= factor[(i / 2) % 2];
    }
    statistics.add(sums);
    release_k();
    if (last) release_q();
    pack(scores, p);
  }

  // The last P V of a tile, on its own.
  __device__ __forceinline__ void close(uint32_t closing) {
    wait_for_v();
    ptx::pin(out);
    issue_values();
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
    end_tile(closing, statistics);
  }

  // Computes the tiles that the producer sends.
  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(barriers.q_full(q_stage(), portion()), q_parity());
      int first_row = tiles[tile % Traits::kTileSlots].first_row;
      Steps<Traits> steps = steps_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots]);
      if constexpr (Traits::kSplit) {
        // Known to be uniform: with registers for them split's kernels have too few.
        first_row = __shfl_sync(kFullWarp, first_row, 0);
        steps.first = __shfl_sync(kFullWarp, steps.first, 0);
        steps.end = __shfl_sync(kFullWarp, steps.end, 0);
      }
      const int group_row = first_row + group * queries_per_group<Traits>(params);
      const Steps<Traits> own = own_steps(first_row, group_row, steps);
      // Unless this group's first step does it.
      const bool at_once = first_row == kNoTile || own.end == 0 || own.end < steps.end;
      if (open && at_once) close(tile - 1);
      if (first_row == kNoTile) break;
      compute(group_row, steps, own);
      // A block has few tiles: that the next one's products run meanwhile is not worth its
      // registers.
      if (Traits::kSplit && open) close(tile);
      q_pipe.advance();
      ++tile;
    }
    if constexpr (!Traits::kSplit) {
      repair_whole_tiles();
    } else {
      // Without a barrier here, and one after what only some lanes store, ptxas serialises the
      // products.
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (suspect || params.score.blind_rows != 0) {
        SplitTileScheduler<Traits> scheduler(params);
        for (Tile written; scheduler.next(&written);) {
          if (written.place == kWholeTile) repair(written);
        }
      }
    }
  }

  // Behind the last tile: repairs what needs it, once all output has left.
  __device__ __forceinline__ void repair_whole_tiles() {
    if (warp_of_group() == 0 && lane_index() == 0) ptx::tma_store_wait();
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
    if (suspect) {
      ptx::fence_proxy_async();
      if constexpr (Traits::kRagged) {
        group = thread_index() / kThreadsPerGroup - 1;  // anew: it costs the main loop no register
        if (params.division == nullptr) {
          repair_all<Tiles::kDealt>();
        } else {
          repair_all<Tiles::kTakenBefore>();
        }
      } else {
        TileScheduler<Traits> scheduler(params);
        for (Tile written; scheduler.next(&written);) repair(written);
      }
    }
  }

  // What `repair` does, of all tiles of the block.
  template <Tiles kTiles>
  __device__ __forceinline__ void repair_all() const {
    // The output has left the memory of this group.
    RaggedScheduler<Traits, kTiles> scheduler(
        params, chunks_of_group() + warp_of_group() * kSequencesPerChunk);
    while (scheduler.next()) {
      Tile written;
      scheduler.describe(&written, group);
      repair(written);
    }
  }

  // One of each warp, where the group's output was.
  __device__ __forceinline__ ChunkSequence* chunks_of_group() const {
    extern __shared__ unsigned char raw[];
    const auto begin = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    return reinterpret_cast<ChunkSequence*>(raw + (shared - begin) + Traits::kOOffset +
                                            group * Traits::kOBytesPerGroup);
  }

  __device__ __forceinline__ Steps<Traits> own_steps(int first_row, int group_row,
                                                     const Steps<Traits>& steps) const {
    const int shift =
        kv_block_alignment_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots], first_row);
    if constexpr (Traits::kSplit) {
      Steps<Traits> own(params.score, sequence(), group_row, params.queries_per_group, shift);
      own.end = group < params.groups_per_tile ? min(own.end, steps.end) : 0;
      return own.end > steps.first ? own : Steps<Traits>(0, 0);
    } else {
      return {params.score, sequence(), group_row, kRowsPerGroup, shift};
    }
  }

  // A group leaves out the steps behind its own, which other groups need; those before it masks.
  __device__ __forceinline__ void compute(int group_row, const Steps<Traits>& steps,
                                          const Steps<Traits>& own) {
    const bool sees_keys = own.end > 0;
    const int end = sees_keys ? own.end : steps.first;
    // First of all: the last V of the tile comes after the next Q.
    if (!sees_keys) release_q();
    int key = steps.end - Traits::kStepKeys;
    // As where a tile begins.
    if (Traits::kSplit) key = __shfl_sync(kFullWarp, key, 0);
    for (; key >= end; key -= Traits::kStepKeys) {
      wait_for_k();
      release_k();
      take_turn();
      pass_turn();
      wait_for_v();
      release_v();
    }
    if (!sees_keys) {
      if constexpr (Traits::kSplit) {
        leave_nothing(tiles[tile % Traits::kTileSlots]);
      } else {
        write_nothing_seen();
      }
      return;
    }
    // Steps between these hold no key that some row of this group does not see.
    const int last_row =
        min(group_row + queries_per_group<Traits>(params), sequence().length_q) - 1;
    const int right_key = sequence().end_key(params.score, group_row) - Traits::kStepKeys;
    const int left_key = sequence().first_key(params.score, last_row);
    const auto masked = [&] { return key > right_key || key < left_key; };
    // No row of the group sees more of its first step.
    const bool narrow =
        Traits::kNarrows && sequence().end_key(params.score, last_row) - key <= Traits::kNarrowKeys;
    if (!Traits::kSplit && open) {
      first_step<true>(group_row, key, masked(), key == steps.first, narrow);
    } else {
      first_step<false>(group_row, key, masked(), key == steps.first, narrow);
    }
    for (key -= Traits::kStepKeys; key >= steps.first; key -= Traits::kStepKeys) {
      next_step(group_row, key, masked(), key == steps.first);
    }
  }

  // Output 0, and the sink as log-sum-exp, for the rows of this warp, which see no key.
  __device__ __forceinline__ void write_nothing_seen() const {
    const Tile here = tiles[tile % Traits::kTileSlots];
    const int first_row = here.first_row + group * kRowsPerGroup + warp_of_group() * 16;
#pragma unroll 1
    for (int row = max(first_row, 0); row < min(first_row + 16, sequence().length_q); ++row) {
      uint16_t* const out_row = out_of(here, row);
#pragma unroll 1
      for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
        out_row[column] = 0;
      }
      if (params.tensors.lse != nullptr && lane_index() == 0) {
        *lse_of(here, row) = here.sink;
      }
    }
  }

  // The same for one row, but for what its lse has beside keys, which `repair` adds: here that
  // would cost the registers that products need.
  __device__ __forceinline__ void write_nothing_to(int batch, int head, int query) const {
    const int row = sequence_of(params, batch).begin_q + query;
    uint16_t* out_row = params.tensors.out + batch * params.tensors.out_strides.batch +
                        head * params.tensors.out_strides.head +
                        row * params.tensors.out_strides.seq;
#pragma unroll 1
    for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
      out_row[column] = 0;
    }
    if (params.tensors.lse != nullptr && lane_index() == 0) {
      params.tensors
          .lse[batch * params.tensors.lse_strides.batch + head * params.tensors.lse_strides.head +
               row * params.tensors.lse_strides.seq] = -INFINITY;
    }
  }

  // Of a row of one head, or of a tile of sequences.
  __device__ __forceinline__ float* lse_of(const Tile& of, int row) const {
    if constexpr (Traits::kRagged) {
      return params.tensors.lse +
             PlaceOfRow::of(params, of, row).offset(params.tensors.lse_strides, of.batch);
    } else {
      return params.tensors.lse + of.batch * params.tensors.lse_strides.batch +
             of.head * params.tensors.lse_strides.head +
             (sequence_of_tile<Traits>(params, of).begin_q + row) * params.tensors.lse_strides.seq;
    }
  }
  __device__ __forceinline__ uint16_t* out_of(const Tile& of, int row) const {
    const RowStrides& strides = params.tensors.out_strides;
    if constexpr (Traits::kRagged) {
      return params.tensors.out + PlaceOfRow::of(params, of, row).offset(strides, of.batch);
    } else {
      return params.tensors.out + of.batch * strides.batch + of.head * strides.head +
             (sequence_of_tile<Traits>(params, of).begin_q + row) * strides.seq;
    }
  }

  // Computes the rows of this warp that came out with an infinity or a NaN again, one at a time,
  // and where keys are split those that see no key. After the last tile, when the accumulators'
  // registers are free: inside the loop this would make it spill.
  __device__ __forceinline__ void repair(const Tile& of) const {
    if constexpr (Traits::kSplit) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const PackedRow row = packed_row(of, warp_of_group() * 16 + i);
        if (row.exists) repair_row(of, row.head, row.query);
      }
    } else {
      const int first_row = of.first_row + group * kRowsPerGroup + warp_of_group() * 16;
      const auto end_row = [&] {
        return min(first_row + 16, sequence_of_tile<Traits>(params, of).length_q);
      };
      for (int row = max(first_row, 0); row < end_row(); ++row) {
        repair_row(of, of.head, row);
      }
    }
  }
  __device__ __forceinline__ void repair_row(const Tile& of, int head, int query) const {
    const RowStrides& strides = params.tensors.out_strides;
    const Sequence sequence = sequence_of_tile<Traits>(params, of);
    const uint16_t* out_row = nullptr;
    if constexpr (Traits::kRagged) {
      out_row = out_of(of, query);
    } else {
      out_row = params.tensors.out + of.batch * strides.batch + head * strides.head +
                (sequence.begin_q + query) * strides.seq;
    }
    bool wrong = Traits::kSplit && !sequence.sees_keys(params.score, query);
    if constexpr (Traits::kRagged) {
      wrong = RaggedKeys{params, of}.misses(sequence.keys(params.score, query));
    }
    for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
      wrong = wrong || numeric::any_nonfinite<Element>(out_row[column]);
    }
    if (!__any_sync(kFullWarp, wrong)) return;
    if constexpr (Traits::kRagged) {
      compute_again<Traits>(params, of, query);
    } else {
      compute_again<Traits>(params, of.batch, head, of.head_kv, query);
    }
  }

  __device__ __forceinline__ PackedRow packed_row(const Tile& of, int row) const {
    return PackedRow::of(params, of, group, row);
  }
  // In the workspace.
  __device__ __forceinline__ int64_t place_of(const Tile& of, int row) const {
    return static_cast<int64_t>(of.place) * Traits::kTileQ + group * kRowsPerGroup + row;
  }

  // Leaves this warp's part of the tile in the workspace. Two columns at a time: stores of four, of
  // whatever columns, would want the accumulators in other registers than wgmma does.
  __device__ __forceinline__ void leave_part(const Tile& of, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_of_group() * 16 + lane / 4 + 8 * half;
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      if (!packed_row(of, row).exists) continue;
      const int64_t place = place_of(of, row);
      if (lane % 4 == 0) {
        params.part_statistics[place] = make_float2(statistics_of_tile.row_max[half], total);
      }
      auto* part =
          reinterpret_cast<float2*>(params.part_outs + place * Traits::kUnitsPerRow) + lane % 4;
#pragma unroll
      for (int j = 0; j < Traits::kDimV / 8; ++j) {
        part[4 * j] = make_float2(out[4 * j + 2 * half], out[4 * j + 2 * half + 1]);
      }
    }
    __syncwarp();
  }

  // The only part of a tile: divides by the sums and writes out and lse.
  __device__ __forceinline__ void write_rows(const Tile& of, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
    bool fallback = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      const PackedRow row = packed_row(of, warp_of_group() * 16 + lane / 4 + 8 * half);
      if (!row.exists) continue;
      const Sequence sequence = sequence_of(params, of.batch);
      const bool sees_keys = sequence.sees_keys(params.score, row.query);
      const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kApprox>(
          params.score, row.head, sees_keys, {statistics_of_tile.row_max[half], total});
      if (params.tensors.lse != nullptr && lane % 4 == 0) {
        params.tensors.lse[of.batch * params.tensors.lse_strides.batch +
                           row.head * params.tensors.lse_strides.head +
                           (sequence.begin_q + row.query) * params.tensors.lse_strides.seq] =
            end.lse;
      }
      uint16_t* out_row = params.tensors.out + of.batch * params.tensors.out_strides.batch +
                          row.head * params.tensors.out_strides.head +
                          (sequence.begin_q + row.query) * params.tensors.out_strides.seq +
                          2 * (lane % 4);
      uint32_t gathered = 0;
#pragma unroll
      for (int j = 0; j < Traits::kDimV / 8; ++j) {
        if (8 * j >= params.tensors.dim_v) break;
        const uint32_t packed = Numeric::pack(out[4 * j + 2 * half] * end.factor,
                                              out[4 * j + 2 * half + 1] * end.factor);
        gathered = numeric::gather_nonfinite<Element>(gathered, packed);
        *reinterpret_cast<uint32_t*>(out_row + 8 * j) = packed;
      }
      // A NaN of the sum is one of the keys that the row sees.
      fallback =
          fallback || end.rounded_away ||
          (params.score.masked && total == total && numeric::any_nonfinite<Element>(gathered));
    }
    __syncwarp();
    suspect = suspect || __any_sync(kFullWarp, fallback);
  }

  // The rows of this warp see no key of the part.
  __device__ __forceinline__ void leave_nothing(const Tile& of) const {
    const int lane = lane_index();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = warp_of_group() * 16 + i;
      const PackedRow which = packed_row(of, row);
      if (!which.exists) continue;
      if (of.place != kWholeTile) {
        if (lane == 0) params.part_statistics[place_of(of, row)] = make_float2(-INFINITY, 0.0f);
      } else {
        write_nothing_to(of.batch, which.head, which.query);
      }
    }
    __syncwarp();
  }

  // Writes what a tile came out as. The next one begins anew.
  __device__ __forceinline__ void end_tile(uint32_t closing, const Statistics& statistics_of_tile) {
    if constexpr (Traits::kSplit) {
      if (tiles[closing % Traits::kTileSlots].place != kWholeTile) {
        leave_part(tiles[closing % Traits::kTileSlots], statistics_of_tile);
      } else {
        write_rows(tiles[closing % Traits::kTileSlots], statistics_of_tile);
      }
    } else {
      finish(closing, statistics_of_tile);
    }
    open = false;
    add = false;
  }

  // Divides by the sums and writes out and lse.
  __device__ __forceinline__ void finish(uint32_t closing, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
    const int warp = warp_of_group();
    const std::conditional_t<Traits::kRagged, const Tile&, Tile> tile =
        tiles[closing % Traits::kTileSlots];
    const SequenceOf<Traits> sequence = sequence_of_tile<Traits>(params, tile);
    const int group_row = tile.first_row + group * kRowsPerGroup;
    float factor[2];
    bool expected[2];  // to be finite, if V is
    bool fallback = false;
    if constexpr (Traits::kRagged) fallback = tile.misses_pages != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group_row + warp * 16 + lane / 4 + 8 * half;
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      const bool sees_keys = sequence.sees_keys(params.score, row);
      const bool exists = row < sequence.length_q;
      const RowEnd end = end_row<RowEndBy::kApprox>(tile.sink, sees_keys && exists,
                                                    {statistics_of_tile.row_max[half], total});
      if (params.tensors.lse != nullptr && lane % 4 == 0 && exists) *lse_of(tile, row) = end.lse;
      factor[half] = end.factor;
      fallback = fallback || end.rounded_away;
      // A NaN of the sum is one of the keys that the row sees. Of short windows steps may stand for
      // others, masked.
      const bool masked = Traits::kWindowSteps > 0 || is_masked<Traits>(params, tile);
      expected[half] = masked && exists && total == total;
    }
    const uint32_t tile_out = shared + Traits::kOOffset + group * Traits::kOBytesPerGroup;
    const bool leader = warp == 0 && lane == 0;
    const int matrix_row = warp * 16 + lane % 16;
    uint32_t gathered[2] = {0, 0};
#pragma unroll
    for (int part = 0; part < Traits::kOutputParts; ++part) {
      constexpr int kPairsPerBox = kBoxColumns / 16;
      constexpr int kPairs = Traits::kDimV / 16;
      const int first_box = part * Traits::kOutputBoxes;
      if (leader) ptx::tma_store_wait_read();  // what came before has left
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
#pragma unroll
      for (int i = 0; i < Traits::kOutputBoxes * kPairsPerBox; ++i) {
        const int pair = first_box * kPairsPerBox + i;
        if (pair >= kPairs) break;
        uint32_t packed[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          packed[r] = Numeric::pack(out[8 * pair + 2 * r] * factor[r % 2],
                                    out[8 * pair + 2 * r + 1] * factor[r % 2]);
          gathered[r % 2] = numeric::gather_nonfinite<Element>(gathered[r % 2], packed[r]);
        }
        const int chunk = 2 * (i % kPairsPerBox) + lane / 16;
        ptx::stmatrix_x4(tile_out + i / kPairsPerBox * Traits::kRowBoxBytes +
                             matrix_row * kBoxRowBytes + ((chunk ^ (matrix_row % 8)) * 16),
                         packed[0], packed[1], packed[2], packed[3]);
      }
      ptx::fence_proxy_async_shared();
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (leader && group_row < sequence.length_q) {
#pragma unroll
        for (int box = first_box; box < Traits::kBoxesV && box < first_box + Traits::kOutputBoxes;
             ++box) {
          const uint32_t from = tile_out + (box - first_box) * Traits::kRowBoxBytes;
          if constexpr (Traits::kRagged) {
            const RaggedRow row = query_box(params, tile, params.rows_per_batch.out, group_row);
            ptx::tma_store(&params.out, from, box * kBoxColumns, row.row, tile.head, row.base,
                           row.wrap);
          } else {
            ptx::tma_store(&params.out, from, box * kBoxColumns, sequence.begin_q + group_row,
                           tile.head, tile.batch);
          }
        }
        ptx::tma_store_commit();
      }
    }
    fallback = fallback || (expected[0] && numeric::any_nonfinite<Element>(gathered[0])) ||
               (expected[1] && numeric::any_nonfinite<Element>(gathered[1]));
    suspect = suspect || __any_sync(kFullWarp, fallback);
  }
};

// Rows of Q that do not exist, nor are loaded, are 0: with anything else their scores might be
// computed again and again.
template <class Traits>
__device__ __forceinline__ void clear_missing_rows(const SplitParams& params,
                                                   unsigned char* memory) {
  constexpr int kChunksOfRow = kBoxRowBytes / 16;
  const int first = params.queries_per_group * params.packed_heads;
  const int chunks = (kRowsPerGroup - first) * kChunksOfRow;
  if (chunks == 0) return;
#pragma unroll 1
  for (int box = 0; box < Traits::kQStages * Traits::kQBytes / Traits::kRowBoxBytes; ++box) {
    auto* rows = reinterpret_cast<uint4*>(memory + Traits::kQOffset + box * Traits::kRowBoxBytes +
                                          first * kBoxRowBytes);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += Traits::kThreads) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_proxy_async_shared();
}

// Whether decoding runs meanwhile, which began when what both need was there (division.h).
template <class Traits>
__device__ __forceinline__ bool runs_beside(const ParamsOf<Traits>& params) {
  if constexpr (Traits::kRagged) {
    return params.division != nullptr;
  } else {
    return false;
  }
}

template <class Traits>
struct WindowConsumer;  // window.cuh

template <class Traits>
using ConsumerOf =
    std::conditional_t<(Traits::kWindowSteps > 0), WindowConsumer<Traits>, Consumer<Traits>>;

// What a block does.
template <class Traits>
__device__ __forceinline__ void compute_tiles(const ParamsOf<Traits>& params) {
  extern __shared__ unsigned char raw[];
  const auto shared_of_block = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const uint32_t shared =
      (shared_of_block + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  const Barriers<Traits> barriers{shared + Traits::kBarriersOffset};
  auto* tiles =
      reinterpret_cast<TileOf<Traits>*>(raw + (shared - shared_of_block) + Traits::kTilesOffset);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      for (int portion = 0; portion < Traits::kQPortions; ++portion) {
        ptx::mbarrier_init(barriers.q_full(stage, portion), 1);
        ptx::mbarrier_init(barriers.q_empty(stage, portion), 4 * Traits::kGroupsPerPortion);
      }
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(barriers.k_full(stage), 1);
      ptx::mbarrier_init(barriers.k_empty(stage), kConsumerWarps);
      ptx::mbarrier_init(barriers.v_full(stage), 1);
      ptx::mbarrier_init(barriers.v_empty(stage), kConsumerWarps);
    }
    if constexpr (Traits::kRagged) {
      for (int slot = 0; slot < Traits::kTileSlots; ++slot) {
        ptx::mbarrier_init(barriers.tile_full(slot), 1);
        ptx::mbarrier_init(barriers.tile_empty(slot), 2);  // both threads that load
      }
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (Traits::kSplit)
    clear_missing_rows<Traits>(params, raw + (shared - shared_of_block));
  __syncthreads();
  // No tensor has been touched so far. The next kernel's blocks may start as soon as this one's
  // leave them room.
  if (!runs_beside<Traits>(params)) {
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }

  const int group = __shfl_sync(kFullWarp, thread / kThreadsPerGroup, 0);
  // Asked by the thread, ptxas puts the producer's code first: nothing starts without its loads,
  // and behind other kernels code has to come from the memory. With split keys the producer would
  // then spill.
  const bool consumes = Traits::kSplit ? group != 0 : thread >= kThreadsPerGroup;
  if (consumes) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    const TileOf<Traits>* const own = &tile_of_group<Traits>(*tiles, group - 1);
    ConsumerOf<Traits> consumer(params, barriers, shared, own, group - 1);
    // Consumer 0 has the first turn.
    if (group == Traits::kConsumers) consumer.pass_turn();
    consumer.run();
  } else {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    if constexpr (Traits::kRagged) {
      auto* chunk = reinterpret_cast<ChunkSequence*>(raw + (shared - shared_of_block) +
                                                     Traits::kSequencesOffset);
      produce_ragged<Traits>(params, shared, tiles, chunk, barriers);
    } else {
      if (thread == 0) produce<Traits>(params, shared, tiles, barriers);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ ParamsOf<Traits> params) {
  compute_tiles<Traits>(params);
}

}  // namespace flashmoe::sm90
