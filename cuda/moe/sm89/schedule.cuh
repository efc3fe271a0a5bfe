// Which tiles there are, and which of them a block computes.
//
// An expert's rows are cut into token tiles, and these times the tiles of its weights are its tiles.
// Blocks take the tiles of all experts in turn. Within an expert all token tiles of a section meet one
// weight tile after the other, so that weights are read once for a section, whose rows of x stay in
// the L2.
#pragma once

#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/traits.cuh"

namespace flashmoe::moe::sm89 {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// Read anew where it is used: kept across the main loop it, and all that follows from it, would cost
// registers that the accumulators need.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ int lane_index() { return thread_index() % kThreadsPerWarp; }
// To be called by whole warps: it shuffles, so that the compiler knows the result to be uniform.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullWarp, thread_index() / kThreadsPerWarp, 0);
}

// Keeps a value in its register.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

// In shared memory.
struct Tile {
  int expert;  // -1: there are no more
  int weight_tile;
  int first_row;  // slot, or with counts the row of the expert
  int rows;
};
static_assert(sizeof(Tile) == 16);

struct ScheduleStorage {
  Tile ring[kTileRing];
  int chunk_end[kExpertChunks];  // token tiles of the experts up to a chunk's last
  uint64_t step_barrier;         // see StepBarrier
};

template <class Traits>
inline constexpr bool kScheduleFits = sizeof(ScheduleStorage) == Traits::kScheduleBytes;

// The rows of an expert, whatever the device data hold.
struct ExpertRows {
  int first;
  int count;

  __device__ __forceinline__ ExpertRows(const Params& params, int expert) : first(0), count(0) {
    if (expert >= params.experts) return;
    if (params.counts != nullptr) {
      count = min(max(params.counts[expert], 0), params.rows);
    } else {
      first = min(max(params.offsets[expert], 0), params.rows);
      count = max(min(params.offsets[expert + 1], params.rows) - first, 0);
    }
  }
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
 public:
  // By all threads; the caller synchronises the block before the first look_up.
  static __device__ __forceinline__ void sum_up(const Params& params, ScheduleStorage& storage) {
    const int warp = warp_index();
    const int lane = lane_index();
    for (int chunk = warp; chunk < kExpertChunks; chunk += Traits::kWarps) {
      const ExpertRows rows(params, chunk * kExpertsPerChunk + lane);
      const int sum = inclusive_sum(token_tiles(rows.count), lane);
      if (lane == kThreadsPerWarp - 1) storage.chunk_end[chunk] = sum;
    }
    __syncthreads();
    if (warp == 0) {
      // Offsets that do not increase may add up to anything; what a call can need is below this.
      constexpr int kMost = 1 << 30;
      long long sum = storage.chunk_end[lane];
#pragma unroll
      for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
        const long long before = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane >= distance) sum += before;
      }
      storage.chunk_end[lane] = static_cast<int>(min(sum, static_cast<long long>(kMost)));
    }
  }

  __device__ __forceinline__ explicit Schedule(const Params& params)
      : token_tile_(static_cast<int>(blockIdx.x) / params.weight_tiles),
        weight_tile_(static_cast<int>(blockIdx.x) % params.weight_tiles) {}

  // The block's next tile, by one warp. `number` counts them.
  __device__ __forceinline__ void look_up(const Params& params, ScheduleStorage& storage,
                                          int number) {
    const int lane = lane_index();
    Tile tile = {-1, 0, 0, 0};
    const int chunk_end = storage.chunk_end[lane];
    const int chunk = __popc(__ballot_sync(kFullWarp, chunk_end <= token_tile_));
    if (chunk < kExpertChunks) {
      const int before_chunk = __shfl_sync(kFullWarp, chunk_end, max(chunk - 1, 0));
      const int in_chunk = token_tile_ - (chunk > 0 ? before_chunk : 0);
      const ExpertRows rows(params, chunk * kExpertsPerChunk + lane);
      const int end = inclusive_sum(token_tiles(rows.count), lane);
      const int owner = min(__popc(__ballot_sync(kFullWarp, end <= in_chunk)), kThreadsPerWarp - 1);
      const int first = __shfl_sync(kFullWarp, rows.first, owner);
      const int count = __shfl_sync(kFullWarp, rows.count, owner);
      const int tiles = token_tiles(count);
      const int number_in_expert = in_chunk - (__shfl_sync(kFullWarp, end, owner) - tiles);
      if (number_in_expert < tiles) {  // not so where sums were cut
        // The tiles of a section in their order: token tiles fastest.
        const int section = number_in_expert / params.section_token_tiles;
        const int section_first = section * params.section_token_tiles;
        const int width = min(params.section_token_tiles, tiles - section_first);
        const int rank = (number_in_expert - section_first) * params.weight_tiles + weight_tile_;
        const int token_tile = section_first + rank % width;
        tile.expert = chunk * kExpertsPerChunk + owner;
        tile.weight_tile = rank / width;
        tile.first_row = token_tile * Traits::kTileTokens;
        tile.rows = min(count - tile.first_row, Traits::kTileTokens);
        share(tile, count, tiles - token_tile);
        tile.first_row += first;
      }
    }
    if (lane == 0) storage.ring[number % kTileRing] = tile;
    // Past the end the tile counter stays where it is: it cannot wrap.
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
  static __device__ __forceinline__ int token_tiles(int rows) {
    return rows / Traits::kTileTokens + (rows % Traits::kTileTokens != 0);
  }

  // A tile of few tokens costs more than its part of a full one, for the weights are the same. If the
  // last one would, it and the one before it, of which there are `left` 1 and 2, share their tokens.
  static __device__ __forceinline__ void share(Tile& tile, int count, int left) {
    constexpr int kStep = Traits::kTokensPerFragment;
    const int last = (count - 1) % Traits::kTileTokens + 1;
    if (count <= Traits::kTileTokens || last > Traits::kFewTokens || left > 2) return;
    const int half = ((Traits::kTileTokens + last) / 2 + (kStep - 1)) / kStep * kStep;
    if (left == 2) {
      tile.rows = half;
    } else {
      tile.first_row += half - Traits::kTileTokens;
      tile.rows = Traits::kTileTokens + last - half;
    }
  }

  // Of the next tile, counted over all experts as if each token tile met its weight tiles in a row.
  int token_tile_;
  int weight_tile_;
};

}  // namespace flashmoe::moe::sm89
