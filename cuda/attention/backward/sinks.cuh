// The gradient of each query head's sink, whose weight in a row is exp(sink - lse):
//
//   dsink = sum over the head's rows of weight (dlse - rowsum(dO * O))
//
// A block has one head. It comes behind the prologue, which leaves delta of each row. Threads take
// rows in turns and the block's sums are added as a tree, so the order is fixed, whatever runs
// beside it. It is a launch of its own: a sum over all batches needs all blocks of the prologue to
// be done.
#pragma once

#include "cuda/attention/backward/params.h"
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

// A whole block.
template <class Traits>
__device__ __forceinline__ void sum_sink_gradient(const CommonParams& params, int head) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  extern __shared__ double sums_of_warps[];
  const int thread = static_cast<int>(threadIdx.x);
  const ScoreOptions& score = params.score;
  const int64_t from = head * score.sink_stride;
  const float sink = score.sinks_are_fp32
                         ? static_cast<const float*>(score.sinks)[from]
                         : Numeric::to_float(static_cast<const uint16_t*>(score.sinks)[from]);
  double sum = 0.0;
  // A sink of -inf is none.
  for (int batch = 0; batch < params.batch && sink != -INFINITY; ++batch) {
    const int64_t row_of_head =
        static_cast<int64_t>(batch * params.heads_q + head) * params.tiles_q * Traits::kTileQ;
#pragma unroll 4
    for (int row = thread; row < params.seq_q; row += kSinksThreads) {
      const float lse = params.lse[batch * params.lse_strides.batch +
                                   head * params.lse_strides.head + row * params.lse_strides.seq];
      // A sink of +inf has the weight 1: so is lse.
      const float weight = sink == lse ? 1.0f : expf(sink - lse);
      if (score.sees_keys(row, params.seq_k)) {
        sum -= static_cast<double>(weight) * params.row_delta[row_of_head + row];
      } else if (params.dlse != nullptr) {
        sum += static_cast<double>(weight) *
               params.dlse[batch * params.dlse_strides.batch + head * params.dlse_strides.head +
                           row * params.dlse_strides.seq];
      }
    }
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
