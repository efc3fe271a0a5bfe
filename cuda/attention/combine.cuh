// Sums parts of rows of the output under a common row max. Each part covers some of a row's keys.
// This is the second kernel of a call whose tiles' keys are split over blocks: it adds up the parts
// that these left in the workspace, and writes out and lse.
//
// A block takes one row or several. Every unit of four columns has one or more threads. A thread
// adds up every so many-th part, kCombineBatch at a time with all loads in flight together. Then
// shared memory sums over the threads of a unit. The order is fixed.
#pragma once

#include "cuda/attention/combine.h"
#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/numeric/dtype.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe {

// Four columns of one row, relative to a row max.
struct Sum {
  float4 out;
  float row_max;
  float sum;

  static __device__ __forceinline__ Sum none() {
    return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoRowMax, 0.0f};
  }
};

// Adds up parts 0 to `parts` - 1. Two functions return their statistics and units.
template <class Statistics, class Unit>
__device__ __forceinline__ Sum add_parts(int parts, Statistics statistics, Unit unit) {
  Sum total = Sum::none();
#pragma unroll 8
  for (int i = 0; i < parts; ++i) total.row_max = fmaxf(total.row_max, statistics(i).x);
#pragma unroll 8
  for (int i = 0; i < parts; ++i) {
    const float2 part = statistics(i);
    const float4 out = unit(i);
    const float factor = numeric::exp2_approx(part.x - total.row_max);
    total.sum = fmaf(part.y, factor, total.sum);
    total.out.x = fmaf(out.x, factor, total.out.x);
    total.out.y = fmaf(out.y, factor, total.out.y);
    total.out.z = fmaf(out.z, factor, total.out.z);
    total.out.w = fmaf(out.w, factor, total.out.w);
  }
  return total;
}

template <class Element>
__device__ __forceinline__ uint2 output_of(const Sum& total, const RowEnd& end) {
  using Numeric = numeric::ElementTraits<Element>;
  return make_uint2(Numeric::pack(total.out.x * end.factor, total.out.y * end.factor),
                    Numeric::pack(total.out.z * end.factor, total.out.w * end.factor));
}

// Whether a row needs the fallback (cuda/attention/masked_row_fallback.cuh): its probabilities are
// rounded away, or with a mask an output is infinite or NaN but the sum is not NaN. A NaN sum comes
// from a key that the row sees.
template <class Element>
__device__ __forceinline__ bool is_suspect(const Sum& total, const RowEnd& end, bool masked,
                                           uint2 output) {
  const bool nonfinite =
      numeric::any_nonfinite<Element>(output.x) || numeric::any_nonfinite<Element>(output.y);
  return end.rounded_away || (masked && nonfinite && total.sum == total.sum);
}

// A row's parts in the workspace. `first` is the place of the first part, in rows; the others
// follow every `step` rows. All are within kMostWorkspaceBytes.
struct RowParts {
  const float4* outs;        // [places][units]
  const float2* statistics;  // [places]: row max and sum; a row max of -inf: no output
  int first;
  int step;
  int count;
};

__device__ __forceinline__ Sum add_sums(const Sum& first, const Sum& second) {
  const Sum both[2] = {first, second};
  return add_parts(
      2, [&](int i) { return make_float2(both[i].row_max, both[i].sum); },
      [&](int i) { return both[i].out; });
}

// Adds up the parts from `worker` on, every `workers`-th.
template <int kUnitsPerRow>
__device__ __forceinline__ Sum add_own_parts(const RowParts& parts, int worker, int workers,
                                             int unit) {
  Sum total = Sum::none();
  for (int first = worker; first < parts.count; first += kCombineBatch * workers) {
    Sum batch[kCombineBatch];
#pragma unroll
    for (int j = 0; j < kCombineBatch; ++j) {
      batch[j] = Sum::none();
      const int part = first + j * workers;
      if (part >= parts.count) continue;
      const int at = parts.first + part * parts.step;
      const float2 statistics = parts.statistics[at];
      const float4 out = parts.outs[at * kUnitsPerRow + unit];
      if (statistics.x != -INFINITY) batch[j] = {out, statistics.x, statistics.y};
    }
    total = add_sums(total, add_parts(
                                kCombineBatch,
                                [&](int j) { return make_float2(batch[j].row_max, batch[j].sum); },
                                [&](int j) { return batch[j].out; }));
  }
  return total;
}

// Grid: blocks of packed rows of a KV head, KV heads of all batches. A family's `Row` is a row of
// its kernels' Params and has kUnitsPerRow units:
//   Row(params, packed, head)
//   parts(params)             returns RowParts
//   write(params, total, unit)  writes a unit, and lse with the first one; returns whether it is
//   suspect
//   Row::compute_again(params, packed, head)  recomputes and writes the row, by a warp
template <class Row>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    attention_combine_kernel(const __grid_constant__ typename Row::Params params) {
  constexpr int kUnitsPerRow = Row::kUnitsPerRow;
  constexpr int kMostRows = kCombineThreads / kUnitsPerRow;
  constexpr int kWarps = kCombineThreads / kThreadsPerWarp;
  static_assert(kCombineThreads % kUnitsPerRow == 0);
  __shared__ float4 outs[kCombineThreads];
  __shared__ float2 statistics[kMostRows];  // of each thread of a unit
  __shared__ int suspects[kMostRows];       // rows of this block
  const int thread = thread_index();
  const int unit = thread % kUnitsPerRow;
  const int slot = thread / kUnitsPerRow;
  const int workers = 1 << params.combine_workers_log2;
  const int worker = slot % workers;
  const int row_of_block = slot >> params.combine_workers_log2;
  const int rows = kMostRows >> params.combine_workers_log2;
  const int first_row = static_cast<int>(blockIdx.x) * rows;
  const int head = static_cast<int>(blockIdx.y);
  const bool exists = first_row + row_of_block < params.rows;
  const Row row(params, min(first_row + row_of_block, params.rows - 1), head);
  const RowParts parts = row.parts(params);
  if (thread < kMostRows) suspects[thread] = 0;
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  Sum total = add_own_parts<kUnitsPerRow>(parts, worker, workers, unit);
  if (workers > 1) {
    outs[thread] = total.out;
    if (unit == 0) statistics[slot] = make_float2(total.row_max, total.sum);
    __syncthreads();
    if (worker == 0) {
      total = add_parts(
          workers, [&](int i) { return statistics[slot + i]; },
          [&](int i) { return outs[thread + i * kUnitsPerRow]; });
    }
  }
  const bool suspect = worker == 0 && exists && row.write(params, total, unit);
  if (!__syncthreads_or(suspect)) return;
  if (suspect) suspects[row_of_block] = 1;
  __syncthreads();
#pragma unroll
  for (int first = 0; first < kMostRows; first += kWarps) {
    const int i = first + thread / kThreadsPerWarp;
    if (i < rows && suspects[i] != 0) Row::compute_again(params, first_row + i, head);
  }
}

}  // namespace flashmoe
