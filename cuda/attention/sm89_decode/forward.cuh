// Attention forward for sequences with few queries each, over keys in pages or rows: decoding.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// A tile is kRows packed query rows of 1, 2 or 4 KV heads of a sequence. A block of 8 warps takes
// an equal range of the keys of all tiles (stream_k.cuh). Within a tile the warps of a KV head take
// steps of kStepKeys keys in turn, each with its own online softmax. K and V go from global memory
// directly to registers (loads.cuh). The next step's loads are in flight during a step, also if
// that is the next tile's: memory does not idle between tiles. At the end of a tile the parts of
// the warps are added up (results.cuh). A tile within one block is written; other tiles leave parts
// in the workspace, which the second kernel adds up (combine.cuh).
//
// With split_keys, ranges are of whole chunks of that many keys, counted from the sequence's first.
// The parts of a tile's chunks are added up in their order, whichever blocks have them: bits depend
// on the sequence alone.
#pragma once

#include "cuda/attention/sm89_decode/results.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::sm89_decode {

// The fragments of the step that a warp computes next, loaded or in flight.
template <class Traits>
struct Ahead {
  CachedK<Traits> k;
  CachedV<Traits> v;
  uint32_t valid;  // 0: no such step, or none of its keys exist
  Factors factors;
  // Page of the step after that one, if `asked`.
  int page;
  bool asked;
};

// This warp's first step of a segment.
template <class Traits>
__device__ __forceinline__ int first_step(const Params& params, const SegmentKeys& keys) {
  const int place = (warp_index() - keys.first_warp) & (warps_of_head<Traits>(params) - 1);
  return keys.key + place * Traits::kStepKeys;
}

// Loads the page number of the step after `next`. Segment `of` has `next`, and the later step is in
// the same segment, or in the next one if `of` is this one.
template <class Traits>
__device__ __forceinline__ void ask_behind(const Params& params, const Segment& segment,
                                           const Segment& next_segment, const Segment& of, int next,
                                           Ahead<Traits>& ahead) {
  int behind = next + round_keys<Traits>(params);
  const Segment* whose = &of;
  SegmentKeys keys = of.keys;
  if (&of == &segment && behind >= keys.end) {
    whose = &next_segment;
    keys = next_segment.keys;
    behind = first_step<Traits>(params, keys);
  }
  ahead.asked = behind < keys.end;
  ahead.page = ask_page<Traits>(params, *whose, keys, behind);
}

// Loads this warp's first step of a segment, if it has one, and the page number of its second.
template <class Traits>
__device__ __forceinline__ void load_first(const Params& params, const Segment& segment,
                                           Ahead<Traits>& ahead) {
  const SegmentKeys keys = segment.keys;
  const int key = first_step<Traits>(params, keys);
  const int behind = key + round_keys<Traits>(params);
  ahead.valid = 0;
  ahead.asked = behind < keys.end;
  if (key >= keys.end) return;
  const int page = ask_page<Traits>(params, segment, keys, key);
  const Step step = find_rows<Traits>(params, segment, key, page);
  load_k<Traits>(ahead.k, params, step);
  ahead.page = ask_page<Traits>(params, segment, keys, behind);
  load_v<Traits>(ahead.v, params, step);
  ahead.valid = step.valid;
  ahead.factors = step.factors;
}

// Computes this warp's steps of a segment, whose first one is loaded, and loads its first step of
// the next segment.
template <class Traits>
__device__ __forceinline__ void compute_segment(const Params& params, const Segment& segment,
                                                const Segment& next_segment,
                                                const few_rows::Shared<Traits>& shared,
                                                const Queries<Traits>& queries,
                                                const few_rows::QFragments<Traits>& q,
                                                Ahead<Traits>& ahead) {
  namespace few = few_rows;
  const few::Shared<Traits> shared_queries = {queries.base};
  few::Statistics<Traits> statistics;
  statistics.reset();
  ValueScales<Traits> value_scales;
  value_scales.reset();
  few::Accumulators<Traits> out;
#pragma unroll
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < Traits::kDimV / 16; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][j][e] = 0.0f;
    }
  }
  const int end = segment.keys.end;
  int key = first_step<Traits>(params, segment.keys);
  while (key < end) {
    // The next step, of this segment or of the next one.
    int next = key + round_keys<Traits>(params);
    const Segment* of = &segment;
    if (next >= end) {
      of = &next_segment;
      next = first_step<Traits>(params, next_segment.keys);
    }
    // The first step after a segment of one step per warp.
    if (!ahead.asked) ahead.page = ask_page<Traits>(params, *of, of->keys, next);

    // Without a next step, none of its keys exist. It is looked up all the same: on every path,
    // loads must complete before their registers are reused.
    Step step;
    few::Scores<Traits> scores;
    const Factors factors = ahead.factors;
    const uint32_t valid = ahead.valid;
    CachedV<Traits> v;
    if constexpr (Traits::kFp8) {
      constexpr bool kFindsFirst = Traits::kFindsFirst;
      CachedK<Traits> k;
      if constexpr (kFindsFirst) step = find_rows<Traits>(params, *of, next, ahead.page);
      order_k<Traits>(k, ahead.k, params.tensors.dim);
      if constexpr (kFindsFirst) load_k<Traits>(ahead.k, params, step);
      order_v<Traits>(v, ahead.v, valid);
      if constexpr (!kFindsFirst) {
        step = find_rows<Traits>(params, *of, next, ahead.page);
        load_k<Traits>(ahead.k, params, step);
      }
      load_v<Traits>(ahead.v, params, step);
      ask_behind<Traits>(params, segment, next_segment, *of, next, ahead);
      multiply_fp8_k<Traits>(scores, k, q, shared_queries);
    } else {
      few::multiply_k<Traits>(scores, ahead.k, q, shared_queries);
      step = find_rows<Traits>(params, *of, next, ahead.page);
      load_k<Traits>(ahead.k, params, step);
      ask_behind<Traits>(params, segment, next_segment, *of, next, ahead);
    }
    scale_scores<Traits>(scores, params, factors);
    if (params.score.capped()) params.score.cap(scores);
    if (valid != kAllValid<Traits> ||
        (segment.tile.masked != 0 &&
         (key < segment.all_first || key + Traits::kStepKeys > segment.all_end))) {
      mask_step<Traits>(scores, params, segment.tile, key, valid);
    }
    statistics.rescale(scores, params.score.scale_log2, out);
    few::Probabilities<Traits> p;
    value_scales.next(params, factors, valid, out);
    statistics.exponentiate(p, scores, params.score.scale_log2,
                            [&](int i, float weight) { return value_scales.weighted(i, weight); });
    if constexpr (Traits::kFp8) {
      multiply_fp8_v<Traits>(out, v, p);
    } else {
      if (valid != kAllValid<Traits>) clear_v<Traits>(ahead.v, valid);
      few::multiply_v<Traits>(out, ahead.v, p);
      load_v<Traits>(ahead.v, params, step);
    }
    ahead.valid = step.valid;
    ahead.factors = step.factors;
    key = of == &segment ? next : end;
  }
  value_scales.finish(params, out);
  few::store_part<Traits>(out, statistics, shared, warp_index(), unit_of<Traits>);
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    attention_forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char memory[];
  const few_rows::Shared<Traits> shared = {memory};
  const ChunkSum<Traits> chunks = {memory + Traits::kSumOffset};
  BlockState& state = *reinterpret_cast<BlockState*>(memory + Traits::kStateOffset);
  const auto queries_of = [&](const Segment& segment, int head) {
    return Queries<Traits>{memory + Traits::kQueriesOffset +
                           (segment.query_buffer * Traits::kTileHeads + head) *
                               Traits::kQueryHeadBytes};
  };
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  if (thread_index() == 0) params.cut_tiles[blockIdx.x].parts = 0;
  const int blocks = stream_k_blocks(params);
  if (static_cast<int>(blockIdx.x) >= blocks) return;
  if (!find_range<Traits>(params, blocks, state)) return;
  few_rows::QFragments<Traits> q;
  Ahead<Traits> ahead;
  ahead.valid = 0;
  int slot = kSegments - 1;  // not a segment; the loads of the first one follow it
  while (true) {
    const Segment& segment = state.segments[slot];
    const int next = (slot + 1) % kSegments;
    const Segment& next_one = state.segments[next];
    // The warp with the fewest keys finds the next segment while keys are in flight. At first that
    // is the warp whose first step, if it has one, is needed last.
    if (next_one.exists != 0 &&
        warp_index() == (segment.exists != 0 ? next_one.keys.first_warp : kWarps - 1)) {
      next_segment<Traits>(params, state, (slot + 2) % kSegments);
    }
    if (next_one.exists != 0 && next_one.new_tile != 0) {
      send_for_q(params, next_one.tile, queries_of(next_one, 0));
    }
    if (ahead.valid == 0) {
      const bool has_step = first_step<Traits>(params, segment.keys) < segment.keys.end;
      load_first(params, has_step ? segment : next_one, ahead);
    }
    if (segment.exists != 0) {
      const Queries<Traits> queries = queries_of(segment, head_of_warp<Traits>(params));
      if (segment.new_tile != 0) load_q(q, queries);
      compute_segment(params, segment, next_one, shared, queries, q, ahead);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (segment.exists != 0) {
      const bool suspect = finish_segment<Traits>(params, segment, shared, chunks, state);
      if (__syncthreads_or(suspect)) compute_rows_again<Traits>(params, segment, state);
    }
    if (next_one.exists == 0) return;
    slot = next;
  }
}

}  // namespace flashmoe::sm89_decode
