// The second kernel of MLA decoding: combines rows of tiles whose keys are split over blocks.
//
// Blocks share the rows of all cut tiles; each block counts them. A warp takes a quarter of a row's
// columns, one unit of four per lane. If there are many parts, several warps share a quarter: each
// adds up every so many-th part, with several loads in flight, and then their sums are added up.
// The number of parts fixes the order.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/sm90_mla/params.h"
#include "cuda/ptx/pdl.cuh"

namespace flashmoe::sm90_mla {

inline constexpr int kSumWarps = kSumThreads / kThreadsPerWarp;
inline constexpr int kSumBatch = 8;  // parts that a lane loads at a time

// Adds up every `step`-th part of a row from `begin` on. All lanes of a warp call it, each for its
// unit.
__device__ __forceinline__ Sum combine_parts(const Params& params,
                                             const attention_decode::CutTile& cut, int row,
                                             int unit, int begin, int step) {
  const auto place_of = [&](int part) {
    const int place = part == 0 ? cut.first : cut.second + part;
    return static_cast<uint32_t>(place * kRows + row);  // at most two blocks per multiprocessor
  };
  Sum total = Sum::none();
  for (int first = begin; first < cut.parts; first += kSumBatch * step) {
    float4 units[kSumBatch];
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      const int part = first + i * step;
      units[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (part < cut.parts) {
        units[i] = params.parts[(place_of(part) << params.part_units_log2) + unit];
      }
    }
    // Lane i has the statistics of part i.
    const int own = first + reread::lane_index() * step;
    const bool has_own = reread::lane_index() < kSumBatch && own < cut.parts;
    const float2 statistics =
        has_own ? params.statistics[place_of(own)] : make_float2(kNoRowMax, 0.0f);
    float row_max = fmaxf(total.row_max, statistics.x);
#pragma unroll
    for (int lanes = 1; lanes < kSumBatch; lanes *= 2) {
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, lanes));
    }
    row_max = __shfl_sync(kFullWarp, row_max, 0);
    const float own_factor = numeric::exp2_approx(statistics.x - row_max);
    const float factor = numeric::exp2_approx(total.row_max - row_max);
    total = {make_float4(total.out.x * factor, total.out.y * factor, total.out.z * factor,
                         total.out.w * factor),
             row_max, total.sum * factor};
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      if (first + i * step >= cut.parts) break;
      const float factor_of_part = __shfl_sync(kFullWarp, own_factor, i);
      total.sum = fmaf(__shfl_sync(kFullWarp, statistics.y, i), factor_of_part, total.sum);
      total.out.x = fmaf(units[i].x, factor_of_part, total.out.x);
      total.out.y = fmaf(units[i].y, factor_of_part, total.out.y);
      total.out.z = fmaf(units[i].z, factor_of_part, total.out.z);
      total.out.w = fmaf(units[i].w, factor_of_part, total.out.w);
    }
  }
  return total;
}

// A part's unit has two columns of each of two groups of eight (Consumer::leave_part). Exchanges
// with the next lane to get four neighbouring columns, and returns their unit.
__device__ __forceinline__ int make_neighbours(float4& out, int unit) {
  const bool odd = unit % 2 != 0;
  const float x = __shfl_xor_sync(kFullWarp, odd ? out.x : out.z, 1);
  const float y = __shfl_xor_sync(kFullWarp, odd ? out.y : out.w, 1);
  if (odd) {
    out.x = x, out.y = y;
  } else {
    out.z = x, out.w = y;
  }
  return unit / 4 * 4 + unit % 2 * 2 + unit / 2 % 2;
}

// Log2 of the warps that add up the parts of a quarter: enough that each has a batch, at most all.
__device__ __forceinline__ int workers_log2_of(int parts) {
  int log2 = 0;
  while (1 << log2 < kSumWarps && kSumBatch << log2 < parts) ++log2;
  return log2;
}

// The range of a cut tile in the work of all tiles, in quarters that a block adds up at a time.
struct WorkOfTile {
  int begin;
  int end;
};

// The work of the cut tile whose number is this thread's; *total is that of all tiles. All threads
// call it.
__device__ __forceinline__ WorkOfTile find_work(const Params& params, int* total) {
  __shared__ int of_warps[kSumWarps];
  const int thread = reread::thread_index();
  const int warp = reread::warp_index();  // all lanes call it: it shuffles
  int count = 0;
  if (thread < params.cuts) {
    const attention_decode::CutTile& cut = params.cut_tiles[thread];
    const int rows = cut.tile.rows;
    if (cut.parts != 0) {
      count = ceil_div<kSumWarps>(rows * kQuarters << workers_log2_of(cut.parts));
    }
  }
  *total = 0;
  // Often no tile is cut: the block then ends after few instructions.
  if (!__syncthreads_or(count != 0)) return {0, 0};
  int upto = count;  // in its warp, up to this thread
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, upto, step);
    if (reread::lane_index() >= step) upto += before;
  }
  if (reread::lane_index() == kThreadsPerWarp - 1) of_warps[warp] = upto;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) {
    if (w < warp) upto += of_warps[w];
    *total += of_warps[w];
  }
  return {upto - count, upto};
}

// A warp's task among those that a block works on at a time.
struct Quarter {
  int row;
  int number;  // in its row
  int worker;
  int workers_log2;

  __device__ __forceinline__ Quarter(const attention_decode::CutTile& cut, int first)
      : workers_log2(workers_log2_of(cut.parts)) {
    const int quarter = first + (reread::warp_index() >> workers_log2);
    row = quarter / kQuarters;
    number = quarter % kQuarters;
    worker = reread::warp_index() & ((1 << workers_log2) - 1);
  }
  __device__ __forceinline__ bool exists(const attention_decode::CutTile& cut) const {
    return row < cut.tile.rows;
  }
  __device__ __forceinline__ int unit() const {
    return number * kThreadsPerWarp + reread::lane_index();
  }
};

// Adds up and writes quarters of a cut tile's rows from `first` on, and lse with the first quarter
// of each row. Returns whether this warp's quarter must be recomputed.
template <class Element>
__device__ __forceinline__ bool combine_quarters(const Params& params,
                                                 const attention_decode::CutTile& cut, int first) {
  __shared__ float4 outs[kSumThreads];
  __shared__ float2 statistics[kSumWarps];
  const Quarter quarter(cut, first);
  const bool exists = quarter.exists(cut);
  Sum total = Sum::none();
  if (exists) {
    total = combine_parts(params, cut, quarter.row, quarter.unit(), quarter.worker,
                          1 << quarter.workers_log2);
  }
  const int warp = reread::warp_index();
  if (quarter.workers_log2 > 0) {
    outs[reread::thread_index()] = total.out;
    if (reread::lane_index() == 0) statistics[warp] = make_float2(total.row_max, total.sum);
    __syncthreads();
    if (quarter.worker == 0) {
      total = add_parts(
          1 << quarter.workers_log2, [&](int i) { return statistics[warp + i]; },
          [&](int i) { return outs[reread::thread_index() + i * kThreadsPerWarp]; });
    }
  }
  if (quarter.worker != 0 || !exists) return false;
  const int unit = make_neighbours(total.out, quarter.unit());
  return __any_sync(
      kFullWarp, attention_decode::write_unit<Element>(total, params, cut.tile, quarter.row, unit));
}

// Recomputes this warp's quarter.
template <class Element, int kDimV>
__device__ __forceinline__ void compute_again(const Params& params,
                                              const attention_decode::CutTile& cut, int first) {
  const Quarter quarter(cut, first);
  const SequenceParams& sequences = params.sequences;
  const SequenceRows rows = sequences.keys_of(cut.tile.sequence);
  const attention_decode::KeysOfRow<Element> keys = {
      params, sequences.paged != 0 ? sequences.keys.pages_of(cut.tile.sequence) : nullptr,
      rows.batch, rows.begin, cut.tile.head_kv};
  const attention_decode::RowOf where(params, cut.tile, quarter.row);
  masked_row_fallback<Element, kDimV>(
      params.tensors, params.score,
      {cut.tile.batch, where.head, cut.tile.head_kv, cut.tile.begin_q + where.query,
       where.keys(params, cut.tile)},
      [&](int column) { return column / (kDimV / kQuarters) == quarter.number; }, keys);
}

// kDimV: upper bound on v's dimension.
template <class Element, int kDimV>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    combine_kernel(const __grid_constant__ Params params) {
  static_assert(kDimV == 4 * kThreadsPerWarp * kQuarters);
  __shared__ attention_decode::CutTile cut;
  __shared__ int first;
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  int total = 0;
  const WorkOfTile own = find_work(params, &total);
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    if (i >= own.begin && i < own.end) {
      cut = params.cut_tiles[reread::thread_index()];
      first = (i - own.begin) * (kSumWarps >> workers_log2_of(cut.parts));
    }
    __syncthreads();
    const bool suspect = combine_quarters<Element>(params, cut, first);
    if (!__syncthreads_or(suspect)) continue;
    if (suspect) compute_again<Element, kDimV>(params, cut, first);
    __syncthreads();
  }
}

}  // namespace flashmoe::sm90_mla
