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

// Adds up the warps' parts of a unit, in the order of their first steps.
template <class Traits>
__device__ __forceinline__ Sum add_warps(const few_rows::Shared<Traits>& shared,
                                         const Segment& segment, int row, int unit) {
  const float2* const statistics = shared.warp_statistics() + row;
  const float4* const parts =
      shared.warp_parts() + row * Traits::kUnitsPerRow + few_rows::swizzle(row, unit);
  const int first = segment.keys.first_warp;
  return add_parts(
      kWarps, [&](int i) { return statistics[(first + i) % kWarps * Traits::kRows]; },
      [&](int i) { return parts[(first + i) % kWarps * Traits::kUnits]; });
}

// Adds up the warps' parts of a segment, and stores the sum where it belongs. All warps have stored
// their parts. Returns the rows in which this thread wrote something suspect, one bit each.
template <class Traits>
__device__ __forceinline__ uint32_t finish_segment(const Params& params, const Segment& segment,
                                                   const few_rows::Shared<Traits>& shared,
                                                   const ChunkSum<Traits>& chunks) {
  const TileRows& tile = segment.tile;
  static_assert(Traits::kRows <= 32);
  uint32_t suspects = 0;
  for (int i = thread_index(); i < tile.rows * Traits::kUnitsPerRow; i += kThreads) {
    const int row = i / Traits::kUnitsPerRow;
    const int unit = i % Traits::kUnitsPerRow;
    Sum total = add_warps(shared, segment, row, unit);
    if (segment.whole == 0) {
      const int64_t place = segment.place;
      params.parts[place * Traits::kUnits + i] = total.out;
      if (unit == 0) {
        params.statistics[place * Traits::kRows + row] = make_float2(total.row_max, total.sum);
      }
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
    const bool suspect = write_unit<typename Traits::Element>(total, params, tile, row, unit);
    suspects |= static_cast<uint32_t>(suspect) << row;
  }
  return suspects;
}

// Computes again the rows of a tile that some thread found suspect, one warp per row; all threads.
// The other rows stay as they are: for tiles that several blocks have, the second kernel decides
// row by row, too, and with split_keys bits must not depend on the number of blocks.
template <class Traits>
__device__ __forceinline__ void compute_rows_again(const Params& params, const Segment& segment,
                                                   uint32_t suspects, BlockState& state) {
  if (suspects != 0) atomicOr(&state.suspect_rows, suspects);
  __syncthreads();
  const uint32_t rows = state.suspect_rows;
  const KeysOfRow<typename Traits::Element> keys = {
      params, segment.keys.pages, segment.keys.batch_k, segment.keys.begin_k, segment.tile.head_kv};
  for (int row = warp_index(); row < segment.tile.rows; row += kWarps) {
    if ((rows >> row & 1) == 0) continue;
    compute_row_again<typename Traits::Element, Traits::kDimV>(params, segment.tile, keys, row);
  }
  __syncthreads();
  if (thread_index() == 0) state.suspect_rows = 0;
}

}  // namespace flashmoe::sm89_decode
