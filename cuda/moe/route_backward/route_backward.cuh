// Gradients of routing. Scores are s, and weights w = scale s / D. D is the sum of s with
// `renormalize`, and 1 otherwise:
//
//   ds_k = scale / D (dw_k - [renormalize] sum of dw_j s_j / D)
//   SOFTMAX        dlogit_e = p_e ([e is chosen] ds - sum of ds_k p_k)     p the softmax
//   TOPK_SOFTMAX   the same among the chosen
//   SIGMOID        dlogit_e = [e is chosen] ds s (1 - s)
//
// plus dlse p_e in any case.
//
// A warp has a token. Its logits, and then their gradients, are a row of shared memory that
// neighbouring lanes read and write; lane k has the k-th chosen expert. Sums over lanes are trees
// in a fixed order. Intermediate values are fp32, except the K scores: their sums cancel, and are
// fp64.
#pragma once

#include "core/ops/moe/problem.h"
#include "cuda/moe/route_backward/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe_route_backward {

static_assert(kMaxTopK <= kThreadsPerWarp, "a lane for each of a token's experts");

__device__ __forceinline__ float load(const Rows& rows, int64_t row, int column) {
  const int64_t index = row * rows.stride + column;
  const auto* halves = static_cast<const uint16_t*>(rows.data);
  switch (static_cast<Dtype>(rows.dtype)) {
    case Dtype::kFloat16: return numeric::ElementTraits<__half>::to_float(halves[index]);
    case Dtype::kBFloat16: return numeric::ElementTraits<__nv_bfloat16>::to_float(halves[index]);
    default: return static_cast<const float*>(rows.data)[index];
  }
}

__device__ __forceinline__ void store(const Rows& rows, int64_t row, int column, float value) {
  const int64_t index = row * rows.stride + column;
  auto* halves = static_cast<uint16_t*>(rows.data);
  switch (static_cast<Dtype>(rows.dtype)) {
    case Dtype::kFloat16: halves[index] = numeric::ElementTraits<__half>::from_float(value); break;
    case Dtype::kBFloat16:
      halves[index] = numeric::ElementTraits<__nv_bfloat16>::from_float(value);
      break;
    default: static_cast<float*>(rows.data)[index] = value;
  }
}

template <class T>
__device__ __forceinline__ T sum_of_lanes(T value) {
#pragma unroll
  for (int distance = kThreadsPerWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}
__device__ __forceinline__ float most_of_lanes(float value) {
#pragma unroll
  for (int distance = kThreadsPerWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// One token, by one warp.
class Token {
 public:
  __device__ __forceinline__ Token(const Params& params, int64_t token, float* row)
      : p_(params), token_(token), row_(row), lane_(lane_index()) {
    if (lane_ < p_.top_k) id_ = p_.ids[token_ * p_.top_k + lane_];
    // If another routing wrote the ids, some may be none of these logits.
    is_expert_ = id_ >= 0 && (p_.given != 0 || id_ < p_.columns);
  }

  __device__ __forceinline__ void differentiate() {
    if (p_.given != 0) {
      if (lane_ < p_.top_k) score_ = static_cast<double>(load(p_.scores, token_, lane_));
      differentiate_scores();
      if (lane_ < p_.top_k) write(lane_, static_cast<float>(dscore_));
      return;
    }
    for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) {
      row_[e] = load(p_.scores, token_, e);
    }
    __syncwarp();
    score();
    differentiate_scores();
    differentiate_logits();
    for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) write(e, row_[e]);
    __syncwarp();
  }

 private:
  static constexpr float kInfinity = __builtin_huge_valf();

  __device__ __forceinline__ bool needs_softmax() const {
    return p_.scoring == FLASHMOE_MOE_SOFTMAX || p_.dlse != nullptr;
  }

  // Computes the scores of the chosen experts, and in row_ the softmax of all if it is needed.
  __device__ __forceinline__ void score() {
    const float logit = is_expert_ ? row_[id_] : -kInfinity;
    __syncwarp();
    if (needs_softmax()) {
      float most = -kInfinity;
      for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) most = fmaxf(most, row_[e]);
      most = most_of_lanes(most);
      float sum = 0.0f;
      for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) {
        row_[e] = expf(row_[e] - most);
        sum += row_[e];
      }
      const float inverse = 1.0f / sum_of_lanes(sum);
      for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) row_[e] *= inverse;
      __syncwarp();
    }
    float score = 0.0f;
    if (p_.scoring == FLASHMOE_MOE_SOFTMAX) {
      if (is_expert_) score = row_[id_];
    } else if (p_.scoring == FLASHMOE_MOE_SIGMOID) {
      score = 1.0f / (1.0f + expf(-logit));
    } else {
      const float power = expf(logit - most_of_lanes(logit));
      const bool counts = lane_ < p_.top_k;
      score = power / sum_of_lanes(counts ? power : 0.0f);
      if (!counts) score = 0.0f;
    }
    score_ = static_cast<double>(score);
  }

  __device__ __forceinline__ void differentiate_scores() {
    if (is_expert_) dscore_ = static_cast<double>(p_.dweights[token_ * p_.top_k + lane_]);
    double divisor = 1.0;
    double mean = 0.0;
    if (p_.renormalize != 0) {
      const double sum = sum_of_lanes(score_);
      const double product = sum_of_lanes(dscore_ * score_);
      // The forward divides by an fp32 sum.
      if (static_cast<float>(sum) != 0.0f) {
        divisor = sum;
        mean = product / sum;
      }
    }
    dscore_ = static_cast<double>(p_.scale) / divisor * (dscore_ - mean);
    if (lane_ >= p_.top_k) dscore_ = 0.0;
  }

  __device__ __forceinline__ void differentiate_logits() {
    const double product = sum_of_lanes(dscore_ * score_);
    if (needs_softmax()) {
      double through_softmax = p_.scoring == FLASHMOE_MOE_SOFTMAX ? -product : 0.0;
      if (p_.dlse != nullptr) through_softmax += static_cast<double>(p_.dlse[token_]);
      const auto factor = static_cast<float>(through_softmax);
      for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) row_[e] *= factor;
      // Adds both terms of a chosen expert at once: they cancel if it has nearly all of the
      // softmax.
      if (is_expert_ && p_.scoring == FLASHMOE_MOE_SOFTMAX) through_ = through_softmax;
    } else {
      for (int e = lane_; e < p_.columns; e += kThreadsPerWarp) row_[e] = 0.0f;
    }
    const double slope = p_.scoring == FLASHMOE_MOE_SIGMOID ? score_ * (1.0 - score_) : score_;
    const double common = p_.scoring == FLASHMOE_MOE_TOPK_SOFTMAX ? product : 0.0;
    const double gradient = slope * (dscore_ - common);
    const double both = score_ * through_ + gradient;
    __syncwarp();
    // Goes in the order of k. The lane that owns an expert's place writes it: ids of another
    // routing may repeat.
    for (int k = 0; k < p_.top_k; ++k) {
      const int id = __shfl_sync(kFullWarp, is_expert_ ? id_ : -1, k);
      const bool repeats = __any_sync(kFullWarp, lane_ < k && is_expert_ && id_ == id);
      const double value = __shfl_sync(kFullWarp, gradient, k);
      const double whole = __shfl_sync(kFullWarp, both, k);
      if (id < 0 || lane_ != id % kThreadsPerWarp) continue;
      const bool replaces = p_.scoring == FLASHMOE_MOE_SOFTMAX && !repeats;
      row_[id] = replaces ? static_cast<float>(whole)
                          : static_cast<float>(static_cast<double>(row_[id]) + value);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void write(int column, float gradient) const {
    if (p_.accumulate != 0) gradient += load(p_.dscores, token_, column);
    store(p_.dscores, token_, column, gradient);
  }

  const Params& p_;
  const int64_t token_;
  float* const row_;
  const int lane_;
  int id_ = -1;
  bool is_expert_;
  double score_ = 0.0;
  double dscore_ = 0.0;
  double through_ = 0.0;
};

__global__ void __launch_bounds__(kWarps* kThreadsPerWarp)
    route_backward_kernel(const __grid_constant__ Params params) {
  extern __shared__ float rows[];  // [kWarps, columns] of logits
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int warp = warp_index();
  float* row = rows + (params.given != 0 ? 0 : warp * params.columns);
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + warp; t < params.tokens; t += step) {
    Token(params, t, row).differentiate();
  }
}

}  // namespace flashmoe::moe_route_backward
