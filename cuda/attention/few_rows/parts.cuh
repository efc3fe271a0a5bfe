// A warp's part of a tile's output in shared memory.
#pragma once

#include "cuda/attention/few_rows/products.cuh"

namespace flashmoe::few_rows {

// The swizzled position of a 16-byte unit in a warp's part. Eight lanes that store at a time, of
// columns 8 apart and rows 2 apart, then meet all banks, as do lanes that read a row.
__device__ __forceinline__ int swizzle(int row, int unit) {
  return unit ^ (row / 2 % 2 + row / 4 % 2 * 4);
}

// Stores a warp's part in shared memory. `unit_of` gives the position of a unit.
template <class Traits, class UnitOf>
__device__ __forceinline__ void store_part(const Accumulators<Traits>& out,
                                           const Statistics<Traits>& statistics,
                                           const Shared<Traits>& shared, int warp,
                                           const UnitOf& unit_of) {
  const int lane = lane_index();
  float4* part = shared.warp_parts() + warp * Traits::kUnits;
#pragma unroll
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * n + 2 * (lane % 4) + e;
      float sum = statistics.sum[2 * n + e];
#pragma unroll
      for (int mask = 4; mask < kThreadsPerWarp; mask *= 2)
        sum += __shfl_xor_sync(kFullWarp, sum, mask);
      if (lane < 4) {
        shared.warp_statistics()[warp * Traits::kRows + row] =
            make_float2(statistics.row_max[2 * n + e], sum);
      }
#pragma unroll
      for (int i = 0; i < Traits::kDimV / 32; ++i) {
        const int j = 2 * i;
        part[row * Traits::kUnitsPerRow + swizzle(row, unit_of(i))] =
            make_float4(out[n][j][e], out[n][j][2 + e], out[n][j + 1][e], out[n][j + 1][2 + e]);
      }
    }
  }
}

}  // namespace flashmoe::few_rows
