// Combines the parts of warps into the output of a tile, the sum of its chunks, or the workspace.
#pragma once

#include "cuda/attention/few_rows/parts.cuh"
#include "cuda/attention/sm89_decode/loads.cuh"

namespace flashmoe::sm89_decode {

// The sum of a tile's chunks so far, [rows, units].
template <class Traits>
struct ChunkSum {
  unsigned char* base;

  __device__ __forceinline__ float4& out(int i) const { return reinterpret_cast<float4*>(base)[i]; }
  __device__ __forceinline__ float2& statistics(int i) const {
    return reinterpret_cast<float2*>(base + Traits::kUnits * 16)[i];
  }
};

// Adds up the parts of a unit of a KV head, of the head's warps in the order of their first steps.
template <class Traits>
__device__ __forceinline__ Sum add_warps(const Params& params,
                                         const few_rows::Shared<Traits>& shared,
                                         const Segment& segment, int head, int row, int unit) {
  const int warps = warps_of_head<Traits>(params);
  const float2* const statistics = shared.warp_statistics() + head * warps * Traits::kRows + row;
  const float4* const parts = shared.warp_parts() + head * warps * Traits::kUnits +
                              row * Traits::kUnitsPerRow + few_rows::swizzle(row, unit);
  const int first = segment.keys.first_warp;
  // Constant numbers of parts, whose loads are all in flight together.
  if (warps == kWarps) {
    return add_parts(
        kWarps, [&](int i) { return statistics[(first + i) % kWarps * Traits::kRows]; },
        [&](int i) { return parts[(first + i) % kWarps * Traits::kUnits]; });
  }
  return add_parts(
      kWarps / 2,
      [&](int i) {
        return i < warps ? statistics[((first + i) & (warps - 1)) * Traits::kRows]
                         : make_float2(kNoRowMax, 0.0f);
      },
      [&](int i) {
        return i < warps ? parts[((first + i) & (warps - 1)) * Traits::kUnits]
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      });
}

// Adds up the warps' parts of a segment, and stores the sums where they belong. All warps have
// stored their parts. Returns whether this thread wrote something suspect.
template <class Traits>
__device__ __forceinline__ bool finish_segment(const Params& params, const Segment& segment,
                                               const few_rows::Shared<Traits>& shared,
                                               const ChunkSum<Traits>& chunks, BlockState& state) {
  const TileRows& tile = segment.tile;
  const int heads_log2 = tile_heads_log2<Traits>(params);
  static_assert(Traits::kRows <= 32);
  bool any_suspect = false;
  for (int i = thread_index(); i < (tile.rows * Traits::kUnitsPerRow) << heads_log2;
       i += kThreads) {
    const int unit = i % Traits::kUnitsPerRow;
    const int row = i / Traits::kUnitsPerRow >> heads_log2;
    const int head = i / Traits::kUnitsPerRow & ((1 << heads_log2) - 1);
    Sum total = add_warps(params, shared, segment, head, row, unit);
    if (segment.whole == 0) {
      const int64_t at = ((int64_t{segment.place} << heads_log2) + head) * Traits::kRows + row;
      params.parts[at * Traits::kUnitsPerRow + unit] = total.out;
      if (unit == 0) params.statistics[at] = make_float2(total.row_max, total.sum);
      continue;
    }
    if (segment.only == 0) {
      Sum before = Sum::none();
      if (segment.new_tile == 0) {
        const float2 statistics = chunks.statistics(i);
        before = {chunks.out(i), statistics.x, statistics.y};
      }
      total = add_sums(before, total);
      if (segment.last == 0) {
        chunks.out(i) = total.out;
        chunks.statistics(i) = make_float2(total.row_max, total.sum);
        continue;
      }
    }
    if (write_unit<typename Traits::Element>(total, params, tile, row, unit, head)) {
      any_suspect = true;
      atomicOr(&state.suspect_rows[head], 1u << row);
    }
  }
  return any_suspect;
}

// Computes again the rows of a tile that some thread found suspect, one warp per row; all threads,
// behind a barrier. The other rows stay as they are: for tiles that several blocks have, the second
// kernel decides row by row, too, and with split_keys bits must not depend on the number of blocks.
template <class Traits>
__device__ __forceinline__ void compute_rows_again(const Params& params, const Segment& segment,
                                                   BlockState& state) {
#pragma unroll 1
  for (int i = warp_index(); i < Traits::kRows << tile_heads_log2<Traits>(params); i += kWarps) {
    const int head = i / Traits::kRows;
    const int row = i % Traits::kRows;
    if ((state.suspect_rows[head] >> row & 1) == 0) continue;
    const KeysOfRow<typename Traits::Element> keys = {params, segment.keys.pages,
                                                      segment.keys.batch_k, segment.keys.begin_k,
                                                      segment.tile.head_kv + head};
    compute_row_again<typename Traits::Element, Traits::kDimV>(params, segment.tile, keys, row,
                                                               head);
  }
  __syncthreads();
  if (thread_index() < kWarps) state.suspect_rows[thread_index()] = 0;
}

}  // namespace flashmoe::sm89_decode
