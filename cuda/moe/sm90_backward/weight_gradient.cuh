// The gradient of experts' weights on sm_90, warp-specialised and persistent.
//
//   dw[e]    [m, n] = sum over the rows r of expert e of a[r, m] b[r, n]
//
// Both operands are stored row by row. Products sum over rows, and both operands' columns are
// contiguous: wgmma takes both MN-major, as they are. A tile is 256 by 192 elements of one expert's
// gradient. Each of two consumer warpgroups has 128 rows of it, 192 accumulators per thread. The
// second one begins a tile some steps later than the first, so that one's products overlap the
// other's stores.
//
// Blocks come in clusters of two with neighbouring columns of the gradient and the same rows. Each
// copies one half of `a` for both, by TMA, and its own `b`. `b` comes by TMA, too; or, if rows of
// tokens are gathered, three warps copy it row by row with cp.async. If rows are gathered and an
// expert has enough of them, the blocks of a cluster instead have the same columns of the gradient
// and neighbouring rows, if there are: each gathers half of the tokens for both, by TMA, and copies
// its own columns of `a`. So it is, too, where an odd number of tiles of columns would leave a
// block without one.
//
// An expert's rows may end within a step, where the next expert's follow. Those are zeroed in
// shared memory, in both operands, because they may hold NaN or infinities. An expert without rows
// has a gradient of zeros.
//
// Every expert has the same number of tiles, whatever its rows. So a tile's number and the order of
// experts determine everything. In a layer with a queue, clusters take tiles dynamically, experts
// with the most rows first, for several gradients in one launch. Otherwise they take tiles in turn.
// One thread computes all products of an element, in the order of rows: bits are the same on every
// run, whichever cluster computes it.
//
// Shared memory: six stages of 28 KiB, and three boxes of the output per consumer. Registers: 224
// per consumer thread, 192 of them sums.
#pragma once

#include "cuda/moe/sm90_backward/params.h"
#include "cuda/moe/sm90_backward/store.cuh"
#include "cuda/moe/sm90_backward/traits.cuh"
#include "cuda/moe/uniform.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/tma_rows.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90_backward {

inline constexpr uint16_t kWholeCluster = (1 << kCluster) - 1;
inline constexpr int kLagBarrier = 1;
inline constexpr int kGroupBarrier = 2;  // one per consumer

// How many steps before the end of a tile the next one is taken, and both blocks are told. A tile
// taken earlier than necessary is not available to clusters that could begin it sooner.
inline constexpr int kTakeSteps = 8;
inline constexpr int kTellSteps = 4;

inline constexpr int32_t kNoTile = -1;

// A tile of a cluster. Its first block sends it to both.
struct Item {
  int32_t expert;
  int32_t first_row;
  int32_t rows;   // kNoTile: no more tiles
  int32_t index;  // among the expert's tiles
};

// A block's part of an item.
struct Tile {
  int job;
  int expert;
  int batch;      // of rows
  int first_row;  // in the batch
  int rows;
  int m;  // first row of this block
  int n;
  int b_boxes;    // its width
  bool shares_b;  // with the other block of the cluster; otherwise they share `a`

  __device__ __forceinline__ bool is_none() const { return rows == kNoTile; }
  template <class Traits>
  __device__ __forceinline__ int steps() const {
    return ceil_div<Traits::kStep>(rows);
  }
};

template <class Traits>
__device__ __forceinline__ Tile tile_of(const Params& params, const Item& item, int rank) {
  Tile tile;
  tile.expert = item.expert;
  tile.batch = params.counts != nullptr ? item.expert : 0;
  tile.first_row = item.first_row;
  tile.rows = item.rows;
  int index = item.index;
  tile.job = 0;
#pragma unroll
  for (int job = 0; job + 1 < kMostJobs; ++job) {
    if (tile.job != job || index < params.jobs[job].tiles) continue;
    index -= params.jobs[job].tiles;
    tile.job = job + 1;
  }
  const Job& job = params.jobs[tile.job];
  const int shared_tiles = job.shared_m_tiles / kCluster * job.n_tiles;
  tile.shares_b = index < shared_tiles;
  if (!tile.shares_b) index -= shared_tiles;
  const int n_tiles = tile.shares_b ? job.n_tiles : ceil_div<kCluster>(job.n_tiles);
  const int m_tile = index / n_tiles;
  const int n_tile = index - m_tile * n_tiles;
  tile.m =
      (tile.shares_b ? m_tile * kCluster + rank : job.shared_m_tiles + m_tile) * Traits::kTileM;
  const int column = tile.shares_b ? n_tile : n_tile * kCluster + rank;
  const int narrow = max(column - job.wide_n_tiles, 0);  // tiles before this one
  tile.n = (column * Traits::kBBoxes - narrow) * kBoxColumns;
  tile.b_boxes = column < job.wide_n_tiles ? Traits::kBBoxes : Traits::kNarrowBBoxes;
  return tile;
}

template <class Traits>
struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t a(int stage) const {
    return base + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + Traits::kABytes; }
  __device__ __forceinline__ uint32_t out(int group) const {
    return base + Traits::kOutOffset + group * Traits::kOutBoxes * Traits::kOutBoxBytes;
  }
  // The stage is loaded: the TMA warp expects bytes, and each gathering thread arrives.
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + Traits::kBarriersOffset + 8 * stage;
  }
  // The stage is free in both blocks of the cluster; the consumer warps of both arrive.
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return full(Traits::kStages + stage);
  }
  // The item in that slot has arrived; in the first block also: all warps of both have read it.
  __device__ __forceinline__ uint32_t told(int slot) const {
    return full(2 * Traits::kStages + slot);
  }
  __device__ __forceinline__ uint32_t read(int slot) const {
    return told(Traits::kItemSlots + slot);
  }
  __device__ __forceinline__ uint32_t item(int slot) const {
    return base + Traits::kItemsOffset + slot * static_cast<int>(sizeof(Item));
  }
};

// ---- items

// The tiles of a block, one after another, for each of its warps.
template <class Traits>
struct Tiles {
  const Params& params;
  const Shared<Traits>& shared;
  int rank;
  int number = 0;

  // Waits for the next tile.
  __device__ __forceinline__ Tile next() {
    const int slot = number % Traits::kItemSlots;
    ptx::mbarrier_wait(shared.told(slot), number / Traits::kItemSlots % 2);
    const float4 words = ptx::load_shared_float4(shared.item(slot));
    const Item item = {__float_as_int(words.x), __float_as_int(words.y), __float_as_int(words.z),
                       __float_as_int(words.w)};
    __syncwarp();
    // The arrival depends on what is read, so that the slot has been read before. A release at
    // cluster scope would wait for all of the warp's memory accesses; with one, reading took 1,100
    // to 4,900 clocks of a tile.
    if (ptx::elect_one() && item.rows >= kNoTile) {
      ptx::mbarrier_arrive_cluster(ptx::map_to_rank(shared.read(slot), 0));
    }
    ++number;
    return tile_of<Traits>(params, item, rank);
  }
};

// Distributes the tiles. The warp of each block that loads by TMA runs it.
template <class Traits>
struct Deal {
  const Params& params;
  const Shared<Traits>& shared;
  int rank;
  bool leader;
  int number = 0;  // of the next item to send
  int item;        // that item; in one thread of the first block
  bool taken = true;

  __device__ __forceinline__ Deal(const Params& params_, const Shared<Traits>& shared_, int rank_)
      : params(params_),
        shared(shared_),
        rank(rank_),
        leader(threadIdx.x == 0),
        item(static_cast<int>(blockIdx.x) / kCluster) {}

  __device__ __forceinline__ void take() {
    if (taken) return;
    taken = true;
    if (rank != 0 || !leader) return;
    const int clusters = static_cast<int>(gridDim.x) / kCluster;
    item = params.taken != nullptr ? clusters + static_cast<int>(atomicAdd(params.taken, 1u))
                                   : item + clusters;
  }

  // Sends the taken item to both blocks.
  __device__ __forceinline__ void tell() {
    const int slot = number % Traits::kItemSlots;
    if (leader) ptx::mbarrier_arrive_expect(shared.told(slot), sizeof(Item));
    if (rank == 0) {
      ptx::mbarrier_wait(shared.read(slot), number / Traits::kItemSlots % 2 ^ 1);
      if (leader) {
        const Item told = find();
        const float4 words = {__int_as_float(told.expert), __int_as_float(told.first_row),
                              __int_as_float(told.rows), __int_as_float(told.index)};
#pragma unroll
        for (uint32_t to = 0; to < kCluster; ++to) {
          ptx::store_async(ptx::map_to_rank(shared.item(slot), to), words,
                           ptx::map_to_rank(shared.told(slot), to));
        }
      }
    }
    __syncwarp();
    ++number;
    taken = false;
  }

 private:
  // Clamps offsets to existing rows.
  __device__ __forceinline__ Item find() const {
    Item found = {0, 0, kNoTile, 0};
    if (item >= params.items) return found;
    found.expert = item / params.tiles;
    found.index = item - found.expert * params.tiles;
    if (params.taken != nullptr) {
      const QueuedExpert queued = params.experts[found.expert];
      found.expert = queued.expert;
      found.first_row = queued.first_row;
      found.rows = queued.rows;
    } else if (params.counts != nullptr) {
      found.rows = min(max(params.counts[found.expert], 0), params.rows);
    } else {
      found.first_row = min(max(params.offsets[found.expert], 0), params.rows);
      const int end = min(max(params.offsets[found.expert + 1], 0), params.rows);
      found.rows = max(end - found.first_row, 0);
    }
    return found;
  }
};

// ---- loads

// The TMA copies of one tile. What its steps share is known to be uniform. Whole warps make it.
template <class Traits>
struct TileCopies {
  const Job& job;
  const Shared<Traits>& shared;
  int rank;
  int m;
  int n;
  int batch;
  int first_row;
  bool is_wide;
  bool shares_b;
  bool loads_b;  // it is not gathered
  int expected;  // bytes of a stage

  __device__ __forceinline__ TileCopies(const Params& params, const Shared<Traits>& shared_,
                                        const Tile& tile, int rank_)
      : job(params.jobs[uniform(tile.job)]),
        shared(shared_),
        rank(rank_),
        m(uniform(tile.m)),
        n(uniform(tile.n)),
        batch(uniform(tile.batch)),
        first_row(uniform(tile.first_row)),
        is_wide(uniform(tile.b_boxes) == Traits::kBBoxes),
        shares_b(uniform(tile.shares_b ? 1 : 0) != 0),
        loads_b(params.gathers == 0) {
    const int boxes = is_wide ? Traits::kBBoxes : Traits::kNarrowBBoxes;
    expected = Traits::kABytes + (loads_b || shares_b ? boxes * Traits::kBoxBytes : 0);
  }

  // Copies the rows of a step. One thread calls it.
  __device__ __forceinline__ void load(int stage, int step) const {
    const uint32_t full = shared.full(stage);
    const int row = first_row + step * Traits::kStep;
    ptx::mbarrier_arrive_expect(full, expected);
    load_a(shared.a(stage), full, row);
    if (!loads_b) return;
    if (is_wide) {
      load_b<Traits::kBBoxes>(shared.b(stage), full, row);
    } else {
      load_b<Traits::kNarrowBBoxes>(shared.b(stage), full, row);
    }
  }

 private:
  // All columns of the tile, or half of them for both blocks.
  __device__ __forceinline__ void load_a(uint32_t to, uint32_t full, int row) const {
    if (shares_b) {
#pragma unroll
      for (int i = 0; i < Traits::kABoxes; ++i) {
        ptx::tma_load(to + i * Traits::kBoxBytes, &job.a, full, ptx::kEvictNormal,
                      m + i * kBoxColumns, row, batch, 0);
      }
      return;
    }
    const int first = rank * Traits::kHalfABoxes;
#pragma unroll
    for (int i = 0; i < Traits::kHalfABoxes; ++i) {
      ptx::tma_load_multicast(to + (first + i) * Traits::kBoxBytes, &job.a, full, ptx::kEvictNormal,
                              kWholeCluster, m + (first + i) * kBoxColumns, row, batch, 0);
    }
  }

  // All rows, or half of them for both blocks.
  template <int kBoxes>
  __device__ __forceinline__ void load_b(uint32_t to, uint32_t full, int row) const {
    constexpr uint32_t kHalfBytes = Traits::kBoxBytes / kCluster;
    if (shares_b) {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        ptx::tma_load_multicast(to + i * Traits::kBoxBytes + rank * kHalfBytes, &job.b, full,
                                ptx::kEvictNormal, kWholeCluster, n + i * kBoxColumns,
                                row + rank * Traits::kHalfBRows, batch, 0);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCluster * kBoxes; ++i) {
      const int half = i % kCluster;
      ptx::tma_load(to + i / kCluster * Traits::kBoxBytes + half * kHalfBytes, &job.b, full,
                    ptx::kEvictNormal, n + i / kCluster * kBoxColumns,
                    row + half * Traits::kHalfBRows, batch, 0);
    }
  }
};

// Issues the copies by TMA. One warp runs it.
template <class Traits>
__device__ __forceinline__ void produce(const Params& params, const Shared<Traits>& shared,
                                        int rank) {
  PipelineState<Traits::kStages> pipe;
  Deal<Traits> deal(params, shared, rank);
  Tiles<Traits> tiles{params, shared, rank};
  deal.tell();
  for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
    const TileCopies<Traits> copies(params, shared, tile, rank);
    const int steps = uniform(tile.template steps<Traits>());
    int step = 0;
    pipe.stage = uniform(pipe.stage);
    const auto load_until = [&](int end) {
#pragma unroll 1
      for (; step < end; ++step) {
        ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
        if (ptx::elect_one()) copies.load(pipe.stage, step);
        __syncwarp();
        pipe.advance();
      }
    };
    // In a tile this short, an item taken now would arrive too late.
    const bool is_short = steps <= kTakeSteps;
    if (!is_short) load_until(steps - kTakeSteps);
    deal.take();
    if (!is_short) load_until(steps - kTellSteps);
    deal.tell();
    if (is_short) deal.take();
    load_until(steps);
  }
  // Waits until both blocks have released all stages: a block must not end before the other block's
  // arrivals at its barriers.
#pragma unroll 1
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
    pipe.advance();
  }
}

// The steps of a block, tile after tile. A warp takes every kGatherWarps-th.
template <class Traits>
struct Steps {
  Tiles<Traits> tiles;
  Tile tile;
  int step;
  int steps;  // of the tile

  __device__ __forceinline__ Steps(const Params& params, const Shared<Traits>& shared, int rank,
                                   int first)
      : tiles{params, shared, rank}, step(first) {
    look();
    skip();
  }
  __device__ __forceinline__ bool more() const { return !tile.is_none(); }
  __device__ __forceinline__ void advance() {
    step += Traits::kGatherWarps;
    skip();
  }

 private:
  __device__ __forceinline__ void look() {
    tile = tiles.next();
    steps = tile.template steps<Traits>();
  }
  __device__ __forceinline__ void skip() {
    while (more() && step >= steps) {
      step -= steps;
      look();
    }
  }
};

// Gathers rows of x; each warp gathers its own steps. If blocks share rows, each lets the copy
// engine copy half of a step's rows for both, 64 columns of a row at a time: copying all of them
// would be slower than the products. Otherwise threads copy: eight lanes copy 128 bytes of a row,
// and then the next 128. The tokens of a step's rows are looked up, one per lane, while the
// previous step is in flight. They cannot be looked up earlier: the warp may wait for the next
// tile, whose announcement waits for this warp's copies.
template <class Traits>
struct Gather {
  static constexpr int kChunk = 8;  // elements per 16 bytes
  static constexpr int kLanesPerRow = kBoxColumns / kChunk;
  static constexpr int kRowsApart = kThreadsPerWarp / kLanesPerRow;
  static constexpr int kRows = Traits::kStep / kRowsApart;  // per lane
  static constexpr uint32_t kRowBytes = kBoxColumns * 2;
  static_assert(kRowsApart == 4, "every second row of a lane has the same swizzle");

  const Params& params;

  // The token of this lane's row of a step. -1 behind the tile's rows, and for invalid tokens.
  __device__ __forceinline__ int look_up(const Steps<Traits>& steps) const {
    const int row = steps.step * Traits::kStep + lane_index();
    if (!steps.more() || row >= steps.tile.rows) return -1;
    const int token = params.row_tokens[steps.tile.first_row + row];
    return token < params.tokens ? token : -1;
  }

  // Copies this block's half of a step's rows, columns from n on, to both blocks.
  template <int kBoxes>
  __device__ __forceinline__ void copy_half(const Job& job, uint32_t to, uint32_t full, int n,
                                            int token, int rank) const {
    constexpr int kHalf = Traits::kHalfBRows;
    // In the map, repeated rows are one, and what lies behind its rows is zeros.
    const int repeated = job.x_row_chunks == 0 ? 0 : token;
    const int row_of_lane = token < 0 ? params.tokens : repeated;
    const int first = rank * kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int row = __shfl_sync(kFullWarp, row_of_lane, first + i);
      if (ptx::elect_one()) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          ptx::tma_load_multicast(to + (first + i) * kRowBytes + box * Traits::kBoxBytes, &job.b,
                                  full, kWholeCluster, n + box * kBoxColumns, row);
        }
      }
    }
  }

  __device__ __forceinline__ void run(const Shared<Traits>& shared, int rank, int warp) const {
    const int lane = lane_index();
    const int chunk = lane % kLanesPerRow;
    const int first_row = lane / kLanesPerRow;
    const uint32_t places[2] = {
        static_cast<uint32_t>(first_row * kRowBytes + (chunk ^ first_row) * 16),
        static_cast<uint32_t>(first_row * kRowBytes + (chunk ^ (first_row + 4)) * 16)};
    PipelineState<Traits::kStages> pipe;
    pipe.advance(warp);
    Steps<Traits> steps(params, shared, rank, warp);
    int token_of_lane = look_up(steps);
    while (steps.more()) {
      const Job& job = params.jobs[steps.tile.job];
      const uint32_t full = shared.full(pipe.stage);
      ptx::mbarrier_wait(shared.empty(pipe.stage), pipe.parity ^ 1);
      const uint32_t to = shared.b(pipe.stage);
      if (steps.tile.shares_b) {
        if (steps.tile.b_boxes == Traits::kBBoxes) {
          copy_half<Traits::kBBoxes>(job, to, full, steps.tile.n, token_of_lane, rank);
        } else {
          copy_half<Traits::kNarrowBBoxes>(job, to, full, steps.tile.n, token_of_lane, rank);
        }
      } else {
        const int column = steps.tile.n + chunk * kChunk;
        const uint16_t* const source = job.x + column;
        const uint32_t x_row_chunks = job.x_row_chunks;
        const int end = min(job.n, steps.tile.n + steps.tile.b_boxes * kBoxColumns);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int token = __shfl_sync(kFullWarp, token_of_lane, first_row + i * kRowsApart);
          const bool valid = token >= 0;
          const uint32_t chunks = static_cast<uint32_t>(max(token, 0)) * x_row_chunks;
          const uint16_t* const from = source + uint64_t{chunks} * kChunk;
#pragma unroll
          for (int box = 0; box < Traits::kBBoxes; ++box) {
            ptx::cp_async_16_or_zero(
                to + places[i % 2] + i * kRowsApart * kRowBytes + box * Traits::kBoxBytes,
                from + box * kBoxColumns, valid && column + box * kBoxColumns < end);
          }
        }
      }
      // Counts the threads' copies. The TMA warp counts the other bytes.
      ptx::cp_async_arrive(full);
      pipe.advance(Traits::kGatherWarps);
      steps.advance();
      token_of_lane = look_up(steps);
    }
  }
};

// ---- products

template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kParts = Traits::kParts;

  const Params& params;
  const Shared<Traits>& shared;
  int group;
  PipelineState<Traits::kStages> pipe;

  // Releases a stage of this warp in both blocks of the cluster.
  __device__ __forceinline__ void release(int stage) const {
    if (ptx::elect_one()) {
#pragma unroll
      for (uint32_t rank = 0; rank < kCluster; ++rank) {
        ptx::mbarrier_arrive_cluster(ptx::map_to_rank(shared.empty(stage), rank));
      }
    }
  }

  // Zeros what follows an expert's last row in its last step. Both consumers do so for `b`, so that
  // neither waits for the other.
  __device__ __forceinline__ void clear(int rows) const {
    constexpr int kRowBytes = kBoxColumns * 2;
    constexpr int kPiece = 16;
    const int pieces = (Traits::kStep - rows) * (kRowBytes / kPiece);
    const float4 zeros{0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = thread_index() % kThreadsPerGroup; i < pieces; i += kThreadsPerGroup) {
      const uint32_t place = rows * kRowBytes + i * kPiece;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::store_shared(own_a(part) + place, zeros);
      }
#pragma unroll
      for (int box = 0; box < Traits::kBBoxes; ++box) {
        ptx::store_shared(shared.b(pipe.stage) + box * Traits::kBoxBytes + place, zeros);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kGroupBarrier + group, kThreadsPerGroup);
  }

  // This consumer's columns of `a` in the current stage.
  __device__ __forceinline__ uint32_t own_a(int part) const {
    return shared.a(pipe.stage) + (group * kParts + part) * Traits::kBoxBytes;
  }

  // A thread's sums of a tile that is kColumns wide.
  template <int kColumns>
  using Sums = float[kParts][kColumns / 2];

  // Issues the products of a step.
  template <int kColumns>
  __device__ __forceinline__ void issue(Sums<kColumns>& sums, int rows_left, bool begins) const {
    using Mma = ptx::Wgmma<Element, kColumns>;
    constexpr int kSliceBytes = 16 * kBoxColumns * 2;  // per 16 rows
    const uint64_t a = ptx::swizzled_descriptor(own_a(0), Traits::kBoxBytes);
    const uint64_t b = ptx::swizzled_descriptor(shared.b(pipe.stage), Traits::kBoxBytes);
    ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
    if (rows_left < Traits::kStep) {
      clear(rows_left);
    } else {
      ptx::fence_proxy_async_shared();  // for the gathered rows
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kStep / 16; ++slice) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Mma::multiply_majors(sums[part],
                             ptx::advance(a, part * Traits::kBoxBytes + slice * kSliceBytes),
                             ptx::advance(b, slice * kSliceBytes), slice > 0 || !begins);
      }
    }
    ptx::wgmma_commit();
  }

  // Computes all products of a tile with at least one step.
  template <int kColumns>
  __device__ __forceinline__ void multiply(Sums<kColumns>& sums, const Tile& tile, int steps) {
    // The first consumer must not reach the barrier for the next tile before the second has reached
    // it for this one. In longer tiles it would need a stage that the second still holds; in tiles
    // this short it must wait.
    const bool meets = steps < Traits::kStages + Traits::kLag;
    const int lag_step = min(Traits::kLag, steps) - 1;
    const auto let_lag = [&](int step) {
      if (group != 0 || step != lag_step) return;
      if (meets) {
        ptx::named_barrier_sync_apart(kLagBarrier, 2 * kThreadsPerGroup);
      } else {
        ptx::named_barrier_arrive(kLagBarrier, 2 * kThreadsPerGroup);
      }
    };
    if (group == 1) ptx::named_barrier_sync_apart(kLagBarrier, 2 * kThreadsPerGroup);
    issue<kColumns>(sums, tile.rows, true);
    let_lag(0);
    int last_stage = pipe.stage;
    pipe.advance();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      issue<kColumns>(sums, tile.rows - step * Traits::kStep, false);
      let_lag(step);
      ptx::wgmma_wait<1>();
      release(last_stage);
      last_stage = pipe.stage;
      pipe.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::pin(sums[part]);
    release(last_stage);
  }

  // Computes a tile that is kColumns wide.
  template <int kColumns>
  __device__ __forceinline__ void compute(const Tile& tile, int steps) {
    constexpr int kSums = kColumns / 2;
    const Job& job = params.jobs[tile.job];
    Sums<kColumns> sums;
    if (steps > 0) {
      multiply<kColumns>(sums, tile, steps);
    } else {
#pragma unroll
      for (int i = 0; i < kParts * kSums; ++i) sums[i / kSums][i % kSums] = 0.0f;
    }
    if (steps == 0 && job.accumulate != 0) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int m = tile.m + group * Traits::kConsumerM + part * Traits::kPartM;
      const uint32_t buffer = shared.out(group);
      const int barrier = kGroupBarrier + group;
      if (job.in_boxes != 0) {
        BoxStore<Traits, kColumns>{job, tile.expert, m, tile.n, buffer, barrier}.run(sums[part]);
      } else {
        LineStore<Traits, kColumns>{job, tile.expert, m, tile.n, buffer, barrier}.run(sums[part]);
      }
    }
  }

  __device__ __forceinline__ void run(int rank) {
    Tiles<Traits> tiles{params, shared, rank};
    for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
      const int steps = __shfl_sync(kFullWarp, tile.template steps<Traits>(), 0);
      pipe.stage = __shfl_sync(kFullWarp, pipe.stage, 0);
      if (__shfl_sync(kFullWarp, tile.b_boxes, 0) == Traits::kBBoxes) {
        compute<Traits::kTileN>(tile, steps);
      } else {
        compute<Traits::kNarrowTileN>(tile, steps);
      }
    }
    if (thread_index() % kThreadsPerGroup == 0) ptx::tma_store_wait();
    __syncwarp();
  }
};

// ---- kernel

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    weight_gradient_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const Shared<Traits> shared{static_cast<uint32_t>(__cvta_generic_to_shared(raw))};
  const bool gathers = params.gathers != 0;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.jobs[0].a);
    ptx::prefetch_tensor_map(&params.jobs[0].b);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1 + (gathers ? kThreadsPerWarp : 0));
      ptx::mbarrier_init(shared.empty(stage), kCluster * 4 * kConsumers);
    }
    const int readers = 1 + 4 * kConsumers + (gathers ? Traits::kGatherWarps : 0);
    for (int slot = 0; slot < Traits::kItemSlots; ++slot) {
      ptx::mbarrier_init(shared.told(slot), 1);
      ptx::mbarrier_init(shared.read(slot), kCluster * readers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  ptx::wait_for_dependencies();
  ptx::launch_dependents();

  const int rank = uniform(static_cast<int>(ptx::cluster_rank()));
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kThreadsPerWarp, 0);
  if (warp >= 4) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>{params, shared, warp / 4 - 1, {}}.run(rank);
  } else {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    if (warp == 0) {
      produce<Traits>(params, shared, rank);
    } else if (gathers) {
      Gather<Traits>{params}.run(shared, rank, warp - 1);
    }
  }
  // The other block of the cluster may still load into this one, and arrive at its barriers.
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace flashmoe::moe::sm90_backward
