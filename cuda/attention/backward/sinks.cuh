// The gradient of each query head's sink. The sink's weight in a row is exp(sink - lse):
//
//   dsink = sum over the head's rows of weight (dlse - rowsum(dO * O))
//
// A block has one head. It runs after the prologue, which leaves the delta of each row. Threads
// take rows round-robin, and the block adds its sums as a tree, so the order is always the same. It
// is a launch of its own because a sum over all batches needs all blocks of the prologue to be
// done.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

inline constexpr int kSinksThreads = 512;
inline constexpr int kSinksWarps = kSinksThreads / kThreadsPerWarp;
inline constexpr int kSinksSharedBytes = kSinksWarps * static_cast<int>(sizeof(double));

__device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
  for (int distance = kThreadsPerWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

// Adds this thread's terms for the rows of a sequence of the head. `of` says where the rows are
// (tile.cuh).
template <class Traits, class Of>
__device__ __forceinline__ void add_sink_rows(const CommonParams& params, const Of& of, int head,
                                              float sink, double* sum) {
  const int seq_q = length_q_of(params, of);
  const auto first_row = [&](const float* numbers, const RowStrides& strides) {
    return numbers + batch_q_of(of) * strides.batch + head * strides.head +
           begin_q_of(of) * strides.seq;
  };
  const float* const row_lse = first_row(params.lse, params.lse_strides);
  const float* const row_delta =
      params.row_delta + static_cast<int64_t>(tile_of_head(params, of, head)) * Traits::kTileQ;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x); row < seq_q; row += kSinksThreads) {
    const float lse = row_lse[row * params.lse_strides.seq];
    // A sink of +inf has weight 1: lse is +inf, too.
    const float weight = sink == lse ? 1.0f : expf(sink - lse);
    if (first_key_of(params, of, row) < end_key_of(params, of, row)) {
      *sum -= static_cast<double>(weight) * row_delta[row];
    } else if (params.dlse != nullptr) {
      const RowStrides& strides = params.dlse_strides;
      *sum += static_cast<double>(weight) * first_row(params.dlse, strides)[row * strides.seq];
    }
  }
}

// A whole block calls it. for_sequences(add) calls add(of) for each sequence of the batch.
template <class Traits, class ForSequences>
__device__ __forceinline__ void sum_sink_gradient(const CommonParams& params, int head,
                                                  const ForSequences& for_sequences) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  extern __shared__ double sums_of_warps[];
  const int thread = static_cast<int>(threadIdx.x);
  const ScoreOptions& score = params.score;
  const int64_t from = head * score.sink_stride;
  const float sink = score.sinks_are_fp32
                         ? static_cast<const float*>(score.sinks)[from]
                         : Numeric::to_float(static_cast<const uint16_t*>(score.sinks)[from]);
  double sum = 0.0;
  // A sink of -inf means no sink.
  if (sink != -INFINITY) {
    for_sequences([&](const auto& of) { add_sink_rows<Traits>(params, of, head, sink, &sum); });
  }
  sum = sum_of_warp(sum);
  if (thread % kThreadsPerWarp == 0) sums_of_warps[thread / kThreadsPerWarp] = sum;
  __syncthreads();
  if (thread >= kThreadsPerWarp) return;
  auto dsink = static_cast<float>(sum_of_warp(thread < kSinksWarps ? sums_of_warps[thread] : 0.0));
  if (thread != 0) return;
  const int64_t to = head * params.dsink_stride;
  if (params.dsinks_are_fp32) {
    float* const at = static_cast<float*>(params.dsinks) + to;
    *at = params.accumulate ? *at + dsink : dsink;
  } else {
    auto* const at = static_cast<uint16_t*>(params.dsinks) + to;
    if (params.accumulate) dsink += Numeric::to_float(*at);
    *at = static_cast<uint16_t>(Numeric::pack(dsink, 0.0f));
  }
}

// For a dense batch.
template <class Traits>
__device__ __forceinline__ void sum_sink_gradient(const CommonParams& params, int head) {
  sum_sink_gradient<Traits>(params, head, [&](const auto& add) {
    Item item = {};
    for (item.batch = 0; item.batch < params.batch; ++item.batch) add(item);
  });
}

static_assert(kSinksWarps <= kThreadsPerWarp, "one warp adds the sums of all");

template <class Traits>
__global__ void __launch_bounds__(kSinksThreads)
    attention_backward_sinks(const __grid_constant__ CommonParams params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  sum_sink_gradient<Traits>(params, static_cast<int>(blockIdx.x));
}

}  // namespace flashmoe::attention_backward
