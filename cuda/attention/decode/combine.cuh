// The second kernel of decoding: combines rows of tiles whose keys are split over blocks.
//
// A block takes some rows of a KV head of a tile, if blocks of the first kernel shared that tile.
// Each unit of four columns of a row has several threads. A thread adds up every so many-th part,
// and then the threads' sums are added up. For chunks, one thread adds up the parts in their order,
// as the first kernel does.
#pragma once

#include "cuda/attention/decode/rows.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::attention_decode {

// Calls add(sum) for every `step`-th part from `begin` on, in order. The loads of several parts are
// in flight together.
template <class Add>
__device__ __forceinline__ void for_parts(const Params& params, const CutTile& cut, int head,
                                          int row, int unit, int begin, int step, const Add& add) {
  // Kept in registers: a value read between loads would wait for these.
  const int parts = cut.parts;
  const int place_of_first = cut.first;
  const int place_of_others = cut.second;
  for (int first = begin; first < parts; first += kCombineBatch * step) {
    Sum batch[kCombineBatch];
#pragma unroll
    for (int j = 0; j < kCombineBatch; ++j) {
      const int part = first + j * step;
      if (part >= parts) break;
      // The workspace has fewer than 2^31 units.
      const int place = part == 0 ? place_of_first : place_of_others + part;
      const int at = ((place << params.tile_heads_log2) + head) * params.part_rows + row;
      const float2 statistics = params.statistics[at];
      batch[j] = {params.parts[(at << params.part_units_log2) + unit], statistics.x, statistics.y};
    }
#pragma unroll
    for (int j = 0; j < kCombineBatch; ++j) {
      if (first + j * step >= parts) break;
      add(batch[j]);
    }
  }
}

static_assert(kCombineThreads == kThreadsPerWarp << kMostCombineRowsLog2);

// Combines rows of a KV head of a cut tile from `first_row` on.
template <class Element, int kDimV>
__device__ __forceinline__ void combine_rows(const Params& params, const CutTile& cut, int head,
                                             int first_row) {
  __shared__ float4 outs[kCombineThreads];
  __shared__ float2 statistics[kCombineThreads];
  __shared__ int again[1 << kMostCombineRowsLog2];
  const int thread = reread::thread_index();
  const int unit = thread & ((1 << params.part_units_log2) - 1);
  const int index = thread >> params.part_units_log2;
  const int row_of_block = index & ((1 << params.combine_rows_log2) - 1);
  const int row = first_row + row_of_block;
  const int worker = index >> params.combine_rows_log2;
  const int units_log2 = params.part_units_log2 + params.combine_rows_log2;  // over all rows
  const bool chunks = params.split_keys > 0;
  const int workers = chunks ? 1 : kCombineThreads >> units_log2;
  const bool there = row < cut.tile.rows;
  if (thread < 1 << kMostCombineRowsLog2) again[thread] = 0;
  Sum total = Sum::none();
  if (worker < workers && there) {
    for_parts(params, cut, head, row, unit, worker, workers,
              [&](const Sum& part) { total = add_sums(total, part); });
  }
  outs[thread] = total.out;
  statistics[thread] = make_float2(total.row_max, total.sum);
  __syncthreads();
  bool suspect = false;
  if (worker == 0 && there) {
    if (workers > 1) {
      total = add_parts(
          workers, [&](int i) { return statistics[thread + (i << units_log2)]; },
          [&](int i) { return outs[thread + (i << units_log2)]; });
    }
    suspect = write_unit<Element>(total, params, cut.tile, row, unit, head);
    if (suspect) again[row_of_block] = 1;
  }
  if (!__syncthreads_or(suspect)) return;
  const int again_row = reread::warp_index();
  if (again[again_row] != 0) {
    const SequenceParams& sequences = params.sequences;
    const SequenceRows rows = sequences.keys_of(cut.tile.sequence);
    const KeysOfRow<Element> keys = {
        params, sequences.paged != 0 ? sequences.keys.pages_of(cut.tile.sequence) : nullptr,
        rows.batch, rows.begin, cut.tile.head_kv + head};
    compute_row_again<Element, kDimV>(params, cut.tile, keys, first_row + again_row, head);
  }
  __syncthreads();
}

// Grid: cut tiles, and blocks that share the rows of all KV heads of each. kDimV: upper bound on
// v's dimension.
template <class Element, int kDimV>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    attention_combine_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  __shared__ CutTile cut;
  constexpr int kWords = sizeof(CutTile) / sizeof(int32_t);
  if (reread::thread_index() < kWords) {  // reads all words at once
    reinterpret_cast<int32_t*>(&cut)[reread::thread_index()] =
        reinterpret_cast<const int32_t*>(&params.cut_tiles[blockIdx.x])[reread::thread_index()];
  }
  __syncthreads();
  if (cut.parts == 0) return;
  const int heads_log2 = params.tile_heads_log2;
  for (int i = static_cast<int>(blockIdx.y);; i += static_cast<int>(gridDim.y)) {
    const int first_row = i >> heads_log2 << params.combine_rows_log2;
    if (first_row >= cut.tile.rows) return;
    combine_rows<Element, kDimV>(params, cut, i & ((1 << heads_log2) - 1), first_row);
  }
}

}  // namespace flashmoe::attention_decode
