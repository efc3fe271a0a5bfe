// Combines the parts of the warps into the output. Parts of a row are added up under their common
// row max: first those of a block's warps, then, in a cluster, those of its blocks. The order is
// always the same. If the blocks of a tile are no cluster, they leave their parts in the workspace.
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/few_rows/parts.cuh"
#include "cuda/attention/sm89_few_rows/loads.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#endif

namespace flashmoe::sm89_few_rows {

using few_rows::store_part;
using few_rows::swizzle;

// The unit of this lane's columns in the m16 blocks 2i and 2i + 1.
__device__ __forceinline__ int unit_of(int i) {
  return 16 * (i / 2) + 2 * (lane_index() / 4) + i % 2;
}

template <class Traits>
__device__ __forceinline__ Sum add_warps(const Shared<Traits>& shared, int row, int unit) {
  const float2* statistics = shared.warp_statistics() + row;
  const float4* parts = shared.warp_parts() + row * Traits::kUnitsPerRow + swizzle(row, unit);
  return add_parts(
      warp_count(), [&](int i) { return statistics[i * Traits::kRows]; },
      [&](int i) { return parts[i * Traits::kUnits]; });
}

// Writes four columns of one row, and lse with the first ones. Returns whether any of them is
// suspect.
template <class Element>
__device__ __forceinline__ bool write_unit(const Sum& total, const Params& params, const Tile& tile,
                                           const Keys& keys, int row, int unit) {
  const bool sees_keys = keys.end > keys.first;
  const Row where = Row::of(params, tile, row);
  const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kExact>(
      params.score, where.head, sees_keys, {total.row_max, total.sum});
  if (unit == 0 && params.tensors.lse != nullptr) {
    params.tensors.lse[where.offset(params.tensors.lse_strides, tile.batch)] = end.lse;
  }
  if (4 * unit >= params.tensors.dim_v) return false;
  const uint2 packed = output_of<Element>(total, end);
  *reinterpret_cast<uint2*>(params.tensors.out +
                            where.offset(params.tensors.out_strides, tile.batch) + 4 * unit) =
      packed;
  return is_suspect<Element>(total, end, params.score.masked != 0, packed);
}

// Units of a tile, row after row, from `first` to before `end`.
struct Units {
  int first;
  int end;
};

// Recomputes a row of a tile by a warp: only its units from `first` to before `end`, and lse with
// the first one.
template <class Traits>
__device__ __forceinline__ void compute_row_again(const Params& params, const Tile& tile,
                                                  const Keys& keys, int row, int first, int end) {
  const Row where = Row::of(params, tile, row);
  masked_row_fallback<typename Traits::Element, Traits::kDimV>(
      params.tensors, params.score,
      {tile.batch, where.head, tile.head_kv, where.row,
       sequence_of(params, tile.batch).rows_of(keys)},
      [&](int column) { return column / 4 >= first && column / 4 < end; });
}

// Recomputes the rows of a tile with suspects. It writes only this block's units, so that two
// blocks cannot disagree.
template <class Traits>
__device__ __noinline__ void masked_rows_fallback(const Params& params, const Tile tile,
                                                  const Shared<Traits> shared, const Units units) {
  for (int row = warp_index(); row < tile.rows; row += warp_count()) {
    const int first = units.first - row * Traits::kUnitsPerRow;
    const int end = units.end - row * Traits::kUnitsPerRow;
    if (first >= Traits::kUnitsPerRow || end <= 0) continue;
    Keys keys = {0, sequence_of(params, tile.batch).length_k};
    if (params.score.masked) keys = shared.keys()[row];
    compute_row_again<Traits>(params, tile, keys, row, first, end);
  }
}

// The units that this block writes: an equal share of the tile, and only existing rows.
template <class Traits>
__device__ __forceinline__ Units units_of_rank(const Params& params, const Tile& tile, int rank) {
  const int share = Traits::kUnits >> params.cluster_log2;
  const int all = tile.rows * Traits::kUnitsPerRow;
  return {min(rank * share, all), min((rank + 1) * share, all)};
}

#if __CUDA_ARCH__ >= 900

// Prepares the barrier that counts what the cluster's blocks send to this one.
template <class Traits>
__device__ __forceinline__ void begin_exchange(const Params& params, const Tile& tile,
                                               const Shared<Traits>& shared) {
  if (thread_index() == 0) {
    const Units units = units_of_rank<Traits>(params, tile, tile.rank);
    ptx::mbarrier_init(shared.barrier(), 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(shared.barrier(),
                                (16 * (units.end - units.first) + Traits::kStatisticsBytes)
                                    << params.cluster_log2);
  }
  ptx::cluster_arrive_relaxed();
}

// Sends each block of the cluster its share of this one's part, and all statistics.
template <class Traits>
__device__ __forceinline__ void send_part(const Params& params, const Tile& tile,
                                          const Shared<Traits>& shared) {
  const int share_log2 = Traits::kUnitsLog2 - params.cluster_log2;
  const uint32_t barrier = shared.barrier();
  const auto parts = static_cast<uint32_t>(__cvta_generic_to_shared(shared.block_parts()));
  const auto statistics =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared.block_statistics()));
  for (int i = thread_index(); i < tile.rows * Traits::kUnitsPerRow; i += thread_count()) {
    const Sum part = add_warps(shared, i / Traits::kUnitsPerRow, i % Traits::kUnitsPerRow);
    const int rank = i >> share_log2;
    const int slot = i + ((tile.rank - rank) << share_log2);  // in this block's area
    ptx::store_async(ptx::map_to_rank(parts + 16 * slot, rank), part.out,
                     ptx::map_to_rank(barrier, rank));
  }
  for (int i = thread_index(); i < Traits::kRows << params.cluster_log2; i += thread_count()) {
    const int row = i % Traits::kRows;
    const int rank = i / Traits::kRows;
    const Sum part = add_warps(shared, row, 0);
    const int slot = tile.rank * Traits::kRows + row;
    ptx::store_async(ptx::map_to_rank(statistics + 8 * slot, rank),
                     make_float2(part.row_max, part.sum), ptx::map_to_rank(barrier, rank));
  }
}

// Adds up what the cluster's blocks have sent.
template <class Traits>
__device__ __forceinline__ Sum add_blocks(const Params& params, const Shared<Traits>& shared,
                                          int row, int slot) {
  const int share = Traits::kUnits >> params.cluster_log2;
  const float2* statistics = shared.block_statistics() + row;
  const float4* parts = shared.block_parts() + slot;
  return add_parts(
      1 << params.cluster_log2, [&](int i) { return statistics[i * Traits::kRows]; },
      [&](int i) { return parts[i * share]; });
}

#endif

// Writes the tile, or this block's share of it. All warps have stored their parts.
template <class Traits>
__device__ __forceinline__ void write_tile(const Params& params, const Tile& tile,
                                           const Shared<Traits>& shared) {
  const Units units = units_of_rank<Traits>(params, tile, tile.rank);
#if __CUDA_ARCH__ >= 900
  const bool exchanges = params.cluster_log2 > 0;
  if (exchanges) {
    ptx::cluster_wait();  // all barriers are ready
    send_part(params, tile, shared);
    ptx::mbarrier_wait_cluster(shared.barrier(), 0);
  }
#endif
  bool suspect = false;
  for (int i = units.first + thread_index(); i < units.end; i += thread_count()) {
    const int row = i / Traits::kUnitsPerRow;
    const int unit = i % Traits::kUnitsPerRow;
#if __CUDA_ARCH__ >= 900
    const Sum total =
        exchanges ? add_blocks(params, shared, row, i - units.first) : add_warps(shared, row, unit);
#else
    const Sum total = add_warps(shared, row, unit);
#endif
    Keys keys = {0, sequence_of(params, tile.batch).length_k};
    if (params.score.masked) keys = shared.keys()[row];
    suspect |= write_unit<typename Traits::Element>(total, params, tile, keys, row, unit);
  }
  if (__syncthreads_or(suspect)) {
    masked_rows_fallback(params, tile, shared, units);
  }
}

// Stores this block's part of the tile in the workspace. All warps have stored theirs.
template <class Traits>
__device__ __forceinline__ void leave_part(const Params& params, const Tile& tile,
                                           const Shared<Traits>& shared) {
  const int64_t block = blockIdx.x;
  for (int i = thread_index(); i < tile.rows * Traits::kUnitsPerRow; i += thread_count()) {
    const int row = i / Traits::kUnitsPerRow;
    const int unit = i % Traits::kUnitsPerRow;
    const Sum part = add_warps(shared, row, unit);
    params.parts[block * Traits::kUnits + i] = part.out;
    if (unit == 0) {
      params.statistics[block * Traits::kRows + row] = make_float2(part.row_max, part.sum);
    }
  }
}

}  // namespace flashmoe::sm89_few_rows
