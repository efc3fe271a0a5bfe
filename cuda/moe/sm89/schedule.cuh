// Which tiles there are, and which of them a block computes.
//
// The rows of an expert are cut into token tiles. Each token tile times each tile of the expert's
// weights is a tile. Blocks take the tiles of all experts in turn. Nothing tells a block that
// another is late, so tiles of equal cost are consecutive: first the full ones, expert by expert,
// then the experts' last ones, those with more tokens first. The numbers of tiles of a kind differ
// by at most one between blocks.
//
// In a swizzle group of full tiles, all token tiles meet one weight tile after the other. So the
// blocks read few rows of x and of the weights at a time, and each serves many of them.
#pragma once

#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm89 {

// Like reread::thread_index, but the compiler knows that it is not negative.
__device__ __forceinline__ int thread_index() {
  const int index = reread::thread_index();
  __builtin_assume(index >= 0);
  return index;
}
__device__ __forceinline__ int lane_index() { return thread_index() % kThreadsPerWarp; }
// Whole warps call it: it shuffles, so that the compiler knows that the result is uniform.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullWarp, thread_index() / kThreadsPerWarp, 0);
}

// A tile in shared memory.
struct Tile {
  int expert;  // -1: no more tiles
  int weight_tile;
  int first_row;  // slot, or with counts the row of the expert
  int rows;
};
static_assert(sizeof(Tile) == 16);

struct ScheduleStorage {
  Tile ring[kTileRing];
  // Cumulative token tiles at the end of each chunk of experts: the full ones in the order of
  // experts, then the others in that of `by_rest`.
  int chunk_end[2 * kExpertChunks];
  uint64_t step_barrier;  // see StepBarrier
  uint16_t by_rest[kMaxExperts];
};

template <class Traits>
inline constexpr bool kScheduleFits = sizeof(ScheduleStorage) == Traits::kScheduleBytes;

// The rows of an expert, clamped to valid ones.
struct ExpertRows {
  int first = 0;
  int count = 0;

  __device__ __forceinline__ ExpertRows(const Params& params, int expert) {
    if (expert >= params.experts) return;
    if (params.counts != nullptr) {
      count = min(max(params.counts[expert], 0), params.rows);
    } else {
      first = min(max(params.offsets[expert], 0), params.rows);
      count = max(min(params.offsets[expert + 1], params.rows), first) - first;
    }
  }
};

// The token tiles of an expert. A tile of few tokens costs more than its part of a full one,
// because the weights are the same. If the last one would have few tokens, it shares rows with the
// one before it.
template <class Traits>
struct TokenTiles {
  int full;
  int rest;        // 0 to 2, after the full ones
  int first_rest;  // rows of the first of these

  __device__ __forceinline__ explicit TokenTiles(int rows) {
    constexpr int kTile = Traits::kTileTokens;
    constexpr int kStep = Traits::kTokensPerFragment;
    const int last = rows % kTile;
    const bool shares = rows > kTile && last > 0 && last <= Traits::kFewTokens;
    full = rows / kTile - shares;
    rest = last > 0 ? 1 + shares : 0;
    first_rest = shares ? ((kTile + last) / 2 + (kStep - 1)) / kStep * kStep : last;
  }

  // Index by the number of tokens of the rest, most first.
  __device__ __forceinline__ int kind() const {
    return Traits::kMaxTokenFragments - ceil_div<Traits::kTokensPerFragment>(first_rest);
  }
  static constexpr int kKinds = Traits::kMaxTokenFragments;
};

__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
    const int before = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

template <class Traits>
class Schedule {
  static constexpr uint16_t kNoExpert = 0xffff;
  static constexpr int kKinds = TokenTiles<Traits>::kKinds;

 public:
  // Scratch of sum_up, free again after it.
  static constexpr int kScratchBytes = kKinds * kExpertChunks * static_cast<int>(sizeof(int));

  // All threads call it. The first warp may then call look_up; the others must pass a block barrier
  // first.
  static __device__ __forceinline__ void sum_up(const Params& params, ScheduleStorage& storage,
                                                int* scratch) {
    const int warp = warp_index();
    const int lane = lane_index();
    for (int chunk = warp; chunk < kExpertChunks; chunk += Traits::kWarps) {
      const TokenTiles<Traits> tiles(rows_of(params, chunk, lane).count);
      const int full = inclusive_sum(tiles.full, lane);
      if (lane == kThreadsPerWarp - 1) storage.chunk_end[chunk] = full;
      for (int kind = 0; kind < kKinds; ++kind) {
        const uint32_t alike = __ballot_sync(kFullWarp, tiles.rest > 0 && tiles.kind() == kind);
        if (lane == 0) scratch[kind * kExpertChunks + chunk] = __popc(alike);
      }
      storage.by_rest[chunk * kExpertsPerChunk + lane] = kNoExpert;
    }
    __syncthreads();
    if (warp == 0) {  // where the experts of each kind and chunk begin
      int before = 0;
      for (int kind = 0; kind < kKinds; ++kind) {
        int& place = scratch[kind * kExpertChunks + lane];
        const int end = inclusive_sum(place, lane) + before;
        place = end - place;
        before = __shfl_sync(kFullWarp, end, kThreadsPerWarp - 1);
      }
    }
    __syncthreads();
    for (int chunk = warp; chunk < kExpertChunks; chunk += Traits::kWarps) {
      const TokenTiles<Traits> tiles(rows_of(params, chunk, lane).count);
      for (int kind = 0; kind < kKinds; ++kind) {
        const bool mine = tiles.rest > 0 && tiles.kind() == kind;
        const uint32_t alike = __ballot_sync(kFullWarp, mine);
        const int place =
            scratch[kind * kExpertChunks + chunk] + __popc(alike & ((1u << lane) - 1));
        if (mine) {
          storage.by_rest[place] = static_cast<uint16_t>(chunk * kExpertsPerChunk + lane);
        }
      }
    }
    __syncthreads();
    for (int chunk = warp; chunk < kExpertChunks; chunk += Traits::kWarps) {
      const int expert = storage.by_rest[chunk * kExpertsPerChunk + lane];
      const TokenTiles<Traits> tiles(ExpertRows(params, expert).count);
      const int rest = inclusive_sum(tiles.rest, lane);
      if (lane == kThreadsPerWarp - 1) storage.chunk_end[kExpertChunks + chunk] = rest;
    }
    __syncthreads();
    if (warp == 0) {
      long long before = 0;
      for (int half = 0; half < 2; ++half) {
        int& chunk_end = storage.chunk_end[half * kExpertChunks + lane];
        long long sum = chunk_end;
#pragma unroll
        for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
          const long long other = __shfl_up_sync(kFullWarp, sum, distance);
          if (lane >= distance) sum += other;
        }
        sum += before;
        before = __shfl_sync(kFullWarp, sum, kThreadsPerWarp - 1);
        // Decreasing offsets may add up to anything. No call needs more than this.
        constexpr long long kMost = 1 << 30;
        chunk_end = static_cast<int>(min(sum, kMost));
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ explicit Schedule(const Params& params)
      : token_tile_(static_cast<int>(blockIdx.x) / params.weight_tiles),
        weight_tile_(static_cast<int>(blockIdx.x) % params.weight_tiles) {}

  // Looks up the block's next tile, by one warp. `number` counts tiles.
  __device__ __forceinline__ void look_up(const Params& params, ScheduleStorage& storage,
                                          int number) {
    const int lane = lane_index();
    Tile tile = {-1, 0, 0, 0};
    const int chunk =
        __popc(__ballot_sync(kFullWarp, storage.chunk_end[lane] <= token_tile_)) +
        __popc(__ballot_sync(kFullWarp, storage.chunk_end[kExpertChunks + lane] <= token_tile_));
    if (chunk < 2 * kExpertChunks) {
      const bool is_rest = chunk >= kExpertChunks;
      const int in_chunk = token_tile_ - (chunk > 0 ? storage.chunk_end[chunk - 1] : 0);
      const int place = chunk % kExpertChunks * kExpertsPerChunk + lane;
      const int expert = is_rest ? storage.by_rest[place] : place;
      const ExpertRows rows(params, expert);
      const TokenTiles<Traits> mine(rows.count);
      const int end = inclusive_sum(is_rest ? mine.rest : mine.full, lane);
      const int owner = min(__popc(__ballot_sync(kFullWarp, end <= in_chunk)), kThreadsPerWarp - 1);
      const int count = __shfl_sync(kFullWarp, rows.count, owner);
      const TokenTiles<Traits> tiles(count);
      const int entry_tiles = is_rest ? tiles.rest : tiles.full;
      const int entry_tile = in_chunk - (__shfl_sync(kFullWarp, end, owner) - entry_tiles);
      if (entry_tile < entry_tiles) {  // false only where sums were clamped
        tile.expert = __shfl_sync(kFullWarp, expert, owner);
        if (is_rest) {
          tile.weight_tile = weight_tile_;
          tile.first_row = tiles.full * Traits::kTileTokens;
          tile.rows = tiles.first_rest;
          if (entry_tile > 0) {
            tile.first_row += tiles.first_rest;
            tile.rows = count - tile.first_row;
          }
        } else {
          const int swizzle = entry_tile / params.swizzle_token_tiles;
          const int swizzle_first = swizzle * params.swizzle_token_tiles;
          const int width = min(params.swizzle_token_tiles, entry_tiles - swizzle_first);
          const int rank = (entry_tile - swizzle_first) * params.weight_tiles + weight_tile_;
          tile.weight_tile = rank / width;
          tile.first_row = (swizzle_first + rank % width) * Traits::kTileTokens;
          tile.rows = Traits::kTileTokens;
        }
        tile.first_row += __shfl_sync(kFullWarp, rows.first, owner);
      }
    }
    if (lane == 0) storage.ring[number % kTileRing] = tile;
    // Past the end the tile counter does not change, so it cannot wrap.
    if (tile.expert >= 0) {
      token_tile_ += static_cast<int>(gridDim.x) / params.weight_tiles;
      weight_tile_ += static_cast<int>(gridDim.x) % params.weight_tiles;
      if (weight_tile_ >= params.weight_tiles) {
        weight_tile_ -= params.weight_tiles;
        ++token_tile_;
      }
    }
  }

 private:
  static __device__ __forceinline__ ExpertRows rows_of(const Params& params, int chunk, int lane) {
    return ExpertRows(params, chunk * kExpertsPerChunk + lane);
  }

  // The next tile, counted over all experts as if each token tile met its weight tiles
  // consecutively.
  int token_tile_;
  int weight_tile_;
};

}  // namespace flashmoe::moe::sm89
