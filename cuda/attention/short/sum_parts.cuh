// The second kernel of a call whose tiles are split over more blocks than a cluster has: it adds up the
// parts that they left in the workspace, [blocks, rows, units] with offsets and sums [blocks, rows], and
// writes out and lse.
//
// A block takes a row. Its threads are groups of one for each unit of four columns; a group adds up
// every kGroups-th part, kBatch at a time, whose loads are all on their way together, and then the
// groups' sums are added up through shared memory. The order is fixed.
#pragma once

#include "cuda/attention/short/combine.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::short_rows {

// This thread's parts of a row: those from `group` on, one in kGroups.
template <class Traits, int kGroups>
__device__ __forceinline__ Sum add_own_parts(const Params& params, int64_t first_block, int row,
                                             int group, int unit) {
  constexpr int kBatch = 4;
  const int parts = static_cast<int>(params.blocks_per_tile.value);
  Sum total = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoOffset, 0.0f};
  for (int i = group; i < parts; i += kBatch * kGroups) {
    Sum batch[kBatch + 1];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      batch[j] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoOffset, 0.0f};
      const int part = i + j * kGroups;
      if (part >= parts) continue;
      const int64_t at = (first_block + part) * Traits::kRows + row;
      batch[j].offset = params.statistics[at].x;
      batch[j].sum = params.statistics[at].y;
      batch[j].out = params.parts[at * Traits::kUnitsPerRow + unit];
    }
    batch[kBatch] = total;
    total = add_parts(
        kBatch + 1, [&](int j) { return make_float2(batch[j].offset, batch[j].sum); },
        [&](int j) { return batch[j].out; });
  }
  return total;
}

// Grid: packed rows of a KV head, KV heads of all batches.
template <class Traits>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ Params params) {
  constexpr int kGroups = kSumThreads / Traits::kUnitsPerRow;
  static_assert(kSumThreads % Traits::kUnitsPerRow == 0);
  __shared__ float4 outs[kSumThreads];
  __shared__ float2 statistics[kGroups];
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int packed = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int index = packed / Traits::kRows;
  const int row = packed % Traits::kRows;
  const Tile tile = Tile::of_rows<Traits>(params, head, index);
  const int64_t first_block = (static_cast<int64_t>(head) * params.tiles_per_head.value + index) *
                              params.blocks_per_tile.value;

  const int group = thread_index() / Traits::kUnitsPerRow;
  const int unit = thread_index() % Traits::kUnitsPerRow;
  const Sum own = add_own_parts<Traits, kGroups>(params, first_block, row, group, unit);
  outs[thread_index()] = own.out;
  if (unit == 0) statistics[group] = make_float2(own.offset, own.sum);
  __syncthreads();
  Keys keys = {0, params.seq_k};
  if (params.masked) keys = keys_of_query(params, Row::of(params, tile, row).query);
  bool nonfinite = false;
  if (group == 0) {
    const Sum total = add_parts(
        kGroups, [&](int i) { return statistics[i]; },
        [&](int i) { return outs[i * Traits::kUnitsPerRow + unit]; });
    nonfinite = write_unit<typename Traits::Element>(total, params, tile, keys, row, unit);
  }
  if (params.masked && __syncthreads_or(nonfinite) && warp_index() == 0) {
    compute_row_again<Traits>(params, tile, keys, row, 0, Traits::kUnitsPerRow);
  }
}

}  // namespace flashmoe::short_rows
