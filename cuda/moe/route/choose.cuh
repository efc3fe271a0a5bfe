// Chooses the experts of tokens, and their weights.
//
// A warp takes a token: each lane loads kPerLane logits and sorts their keys. Then, K times, the
// greatest of the lanes' first keys is the next expert, and its lane moves on to its next key. Lane
// r keeps the r-th expert. With many tokens a warp takes two or four at a time, each with its
// experts in a part of the lanes: the work after the choice then covers all of them at once. Logits
// of the next tokens are in flight meanwhile.
#pragma once

#include "core/dtype.h"
#include "cuda/moe/route/keys.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/thread.cuh"
#include "flashmoe/moe.h"

namespace flashmoe::moe_route {

// One pair of a token and an expert, in a lane.
struct Choice {
  int token;   // negative: this lane has no pair
  int k;       // index among the token's pairs
  int expert;  // negative: not an expert of this call
  float weight;
};

// Sum over kCount neighbouring lanes.
template <int kCount>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int mask = kCount / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kFullWarp, value, mask);
  return value;
}

__device__ __forceinline__ float to_float(const void* data, int64_t index, int dtype) {
  if (dtype == static_cast<int>(Dtype::kFloat32)) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == static_cast<int>(Dtype::kFloat16)
             ? numeric::ElementTraits<__half>::to_float(bits)
             : numeric::ElementTraits<__nv_bfloat16>::to_float(bits);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// Chooses by logits. A token has at most 32 * kExpertsPerLane of them.
template <int kExpertsPerLane, class KeyTraits>
class LogitChooser {
 public:
  using Key = typename KeyTraits::Type;
  static constexpr int kPerLane = kExpertsPerLane;
  static constexpr int kKeyWords = kPerLane * static_cast<int>(sizeof(Key)) / 4;
  // Tokens that a warp may take at a time if there are many: as many as registers allow.
  static constexpr int kBatch = kKeyWords <= 4 ? 4 : kKeyWords <= 8 ? 2 : 1;
  static constexpr int kThreads = kKeyWords <= 16 ? 1024 : kKeyWords <= 32 ? 512 : 256;  // at most

  // Words of shared memory per warp.
  static int scratch_words(int experts, int num_groups) {
    return num_groups > 1 ? experts + 2 * num_groups : 0;
  }

  __device__ __forceinline__ LogitChooser(const Params& params, uint32_t* scratch)
      : params_(params), scratch_(scratch) {}

  // Calls take(choice, distinct) with the choices for all of a warp's tokens. `distinct`: all lanes
  // have choices of one token, and thus different experts.
  template <bool kMany, class Take>
  __device__ __forceinline__ void choose(int token, int end, Take take) {
    if constexpr (kMany && kBatch > 1) {
      if (params_.top_k <= kThreadsPerWarp / kBatch && token + kBatch <= end) {
        Raw raw[kBatch];
        load_batch<kBatch>(raw, token);
        for (; token + kBatch <= end; token += kBatch) {
          float logits[kBatch][kPerLane];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) to_floats(logits[b], raw[b]);
          if (token + 2 * kBatch <= end) load_batch<kBatch>(raw, token + kBatch);
          take(choose_batch<kBatch>(token, logits), false);
        }
      }
    }
    if (token >= end) return;
    Raw raw[1];
    load_batch<1>(raw, token);
    for (; token < end; ++token) {
      float logits[1][kPerLane];
      to_floats(logits[0], raw[0]);
      if (token + 1 < end) load_batch<1>(raw, token + 1);
      take(choose_batch<1>(token, logits), true);
    }
  }

 private:
  static constexpr int kVector = kPerLane < KeyTraits::kVector ? kPerLane : KeyTraits::kVector;

  // Bits of a lane's logits of one token.
  struct Raw {
    uint32_t words[KeyTraits::kAnyChoice ? kPerLane : (kPerLane + 1) / 2];
  };

  // Chooses for kTokens tokens from `token` on. Each has its experts in kTokenLanes lanes.
  template <int kTokens>
  __device__ __forceinline__ Choice choose_batch(int token,
                                                 const float (&logits)[kTokens][kPerLane]) {
    constexpr int kTokenLanes = kThreadsPerWarp / kTokens;
    const int lane = lane_index();
    const int k = lane % kTokenLanes;
    const int row = lane / kTokenLanes;  // index of this lane's token

    Key keys[kTokens][kPerLane];
    Key mine = 0;
    float greatest[kTokens];
#pragma unroll
    for (int b = 0; b < kTokens; ++b) {
      make_keys(keys[b], logits[b]);
      sort<0, kPerLane>(keys[b]);
    }
    const auto take_next = [&](int r) {
#pragma unroll
      for (int b = 0; b < kTokens; ++b) {
        const Key next = KeyTraits::warp_max(keys[b][0]);
        if (r == 0) greatest[b] = KeyTraits::choice(next);
        if (row == b && k == r) mine = next;
        const bool from_here = keys[b][0] == next;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const Key behind = j + 1 < kPerLane ? keys[b][j + 1] : 0;
          keys[b][j] = from_here ? behind : keys[b][j];
        }
      }
    };
    take_next(0);
    for (int r = 1; r < params_.top_k; ++r) take_next(r);
    const bool present = k < params_.top_k;
    const int expert = present ? KeyTraits::expert(mine) : 0;
    const float weight =
        weigh<kTokens>(token + row, k, expert, KeyTraits::choice(mine), greatest, logits);
    return {present ? token + row : -1, k, expert, weight};
  }

  __device__ __forceinline__ bool biased() const {
    return KeyTraits::kAnyChoice && params_.bias != nullptr;
  }

  // The expert of a lane's j-th logit.
  static __device__ __forceinline__ int expert_of(int lane, int j) {
    return j / kVector * (kThreadsPerWarp * kVector) + lane * kVector + j % kVector;
  }

  __device__ __forceinline__ bool is_fp32() const {
    return KeyTraits::kAnyChoice && params_.dtype == static_cast<int>(Dtype::kFloat32);
  }

  template <int kTokens>
  __device__ __forceinline__ void load_batch(Raw (&raw)[kTokens], int token) const {
#pragma unroll
    for (int b = 0; b < kTokens; ++b) {
      const int64_t offset = (token + b) * params_.logits_stride;
      if (is_fp32()) {
        load_elements(raw[b], static_cast<const uint32_t*>(params_.logits) + offset);
      } else {
        load_elements(raw[b], static_cast<const uint16_t*>(params_.logits) + offset);
      }
    }
  }

  template <class Bits>
  __device__ __forceinline__ void load_elements(Raw& raw, const Bits* row) const {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
    constexpr int kWords = kVector >= kPerWord ? kVector / kPerWord : 1;
    const int lane = lane_index();
#pragma unroll
    for (int v = 0; v < kPerLane / kVector; ++v) {
      const int first = expert_of(lane, v * kVector);
      uint32_t* words = raw.words + v * kWords;
      if (params_.vectors && first + kVector <= params_.experts) {
        const void* from = row + first;
        if constexpr (kWords == 4) {
          const uint4 loaded = *static_cast<const uint4*>(from);
          words[0] = loaded.x;
          words[1] = loaded.y;
          words[2] = loaded.z;
          words[3] = loaded.w;
        } else if constexpr (kWords == 2) {
          const uint2 loaded = *static_cast<const uint2*>(from);
          words[0] = loaded.x;
          words[1] = loaded.y;
        } else {
          words[0] = *static_cast<const Bits*>(from);
        }
      } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          uint32_t word = 0;
#pragma unroll
          for (int i = 0; i < kPerWord && i < kVector; ++i) {
            const int expert = first + w * kPerWord + i;
            if (expert < params_.experts)
              word |= uint32_t{row[expert]} << (8 * sizeof(Bits) * i % 32);
          }
          words[w] = word;
        }
      }
    }
  }

  // Pads with -inf after the last expert.
  __device__ __forceinline__ void to_floats(float (&logits)[kPerLane], const Raw& raw) const {
    const int lane = lane_index();
    const bool fp32 = is_fp32();
    const bool fp16 = params_.dtype == static_cast<int>(Dtype::kFloat16);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t pair = raw.words[j / 2];
      float value;
      if (fp32) {
        value = __uint_as_float(raw.words[KeyTraits::kAnyChoice ? j : 0]);
      } else if (fp16) {
        const auto bits = static_cast<uint16_t>(j % 2 == 0 ? pair : pair >> 16);
        value = numeric::ElementTraits<__half>::to_float(bits);
      } else {
        value = __uint_as_float(j % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
      }
      logits[j] = expert_of(lane, j) < params_.experts ? value : -INFINITY;
    }
  }

  __device__ __forceinline__ void make_keys(Key (&keys)[kPerLane],
                                            const float (&logits)[kPerLane]) const {
    const int lane = lane_index();
    if (!KeyTraits::kAnyChoice || (params_.bias == nullptr && params_.num_groups == 1)) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) keys[j] = KeyTraits::of(logits[j], expert_of(lane, j));
      return;
    }
    if constexpr (KeyTraits::kAnyChoice) {
      float choices[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int expert = expert_of(lane, j);
        choices[j] = -INFINITY;
        if (expert < params_.experts) {
          choices[j] = sigmoid(logits[j]) + (params_.bias != nullptr ? params_.bias[expert] : 0.0f);
        }
      }
      if (params_.num_groups > 1) choose_groups(choices);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int expert = expert_of(lane, j);
        keys[j] = KeyTraits::of(params_.bias != nullptr ? choices[j] : logits[j], expert);
        if (params_.num_groups > 1 && !in_chosen_group(expert)) {
          keys[j] = KeyTraits::excluded(expert);
        }
      }
    }
  }

  // Stores in shared memory which groups may be chosen from.
  __device__ __forceinline__ void choose_groups(const float (&choices)[kPerLane]) const {
    const int lane = lane_index();
    const int lanes = 1 << params_.group_lanes_log2;
    const int steps = params_.group_steps;
    auto* values = reinterpret_cast<float*>(scratch_);
    uint32_t* groups = scratch_ + params_.experts;
    __syncwarp();  // all lanes have finished the previous token
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int expert = expert_of(lane, j);
      if (expert < params_.experts) values[expert] = canonical(choices[j]);
    }
    __syncwarp();
    for (int base = 0; base < params_.num_groups;
         base += kThreadsPerWarp >> params_.group_lanes_log2) {
      const int group = base + (lane >> params_.group_lanes_log2);
      float most = -INFINITY;
      float second = -INFINITY;
      if (group < params_.num_groups) {
        const float* first = values + group * params_.group_experts + (lane & (lanes - 1));
        int step = group < steps ? group : 0;  // spreads the lanes over banks
        for (int i = 0; i < steps; ++i) {
          const float value = first[step << params_.group_lanes_log2];
          second = fmaxf(second, fminf(most, value));
          most = fmaxf(most, value);
          step = step + 1 == steps ? 0 : step + 1;
        }
      }
      for (int mask = 1; mask < lanes; mask *= 2) {
        const float other = __shfl_xor_sync(kFullWarp, most, mask);
        second = fmaxf(fmaxf(second, __shfl_xor_sync(kFullWarp, second, mask)), fminf(most, other));
        most = fmaxf(most, other);
      }
      if (group < params_.num_groups && (lane & (lanes - 1)) == 0) {
        groups[group] = ordered_bits(canonical(most + second));
      }
    }
    __syncwarp();
    // A group is chosen from unless top_groups others come before it.
    uint32_t* chosen = groups + params_.num_groups;
    for (int group = lane; group < params_.num_groups; group += kThreadsPerWarp) {
      const uint32_t mine = groups[group];
      int before = 0;
#pragma unroll 4
      for (int other = 0; other < params_.num_groups; ++other) {
        const uint32_t theirs = groups[other];
        before += theirs > mine || (theirs == mine && other < group) ? 1 : 0;
      }
      chosen[group] = before < params_.top_groups ? 1 : 0;
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool in_chosen_group(int expert) const {
    const uint32_t* chosen = scratch_ + params_.experts + params_.num_groups;
    return expert < params_.experts && chosen[params_.into_groups.quotient(expert)] != 0;
  }

  // Computes the weight of a lane's expert, and the log sum exp of the tokens.
  template <int kTokens>
  __device__ __forceinline__ float weigh(int token, int k, int expert, float logit,
                                         const float (&greatest)[kTokens],
                                         const float (&logits)[kTokens][kPerLane]) const {
    constexpr int kTokenLanes = kThreadsPerWarp / kTokens;
    const int scoring = params_.scoring;
    const bool present = k < params_.top_k;
    // The choice may differ from the logit, or may stand for a NaN.
    if (biased() || __any_sync(kFullWarp, present && logit == -INFINITY)) {
      if (present) {
        logit = to_float(params_.logits, token * params_.logits_stride + expert, params_.dtype);
      }
    }
    float most = greatest[0];
    float sum = 0.0f;
    if (scoring == FLASHMOE_MOE_SOFTMAX || params_.lse != nullptr) {
      float sums[kTokens];
      float mosts[kTokens];
#pragma unroll
      for (int b = 0; b < kTokens; ++b) {
        mosts[b] = greatest[b];
        if (KeyTraits::kAnyChoice && (params_.bias != nullptr || params_.num_groups > 1)) {
          mosts[b] = greatest_logit(logits[b]);
        }
        sums[b] = 0.0f;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          sums[b] += numeric::exp2_approx((logits[b][j] - mosts[b]) * kLog2E);
        }
      }
      sum = sum_each(sums);
      most = pick(mosts);
      if (params_.lse != nullptr) {
        bool any_nan = false;
#pragma unroll
        for (int b = 0; b < kTokens; ++b)
          any_nan |= has_nan(logits[b], mosts[b]) && b == lane_index() / kTokenLanes;
        // An infinity is the result, unless there is a NaN: the sum of differences to it would be
        // NaN.
        const float lse = isinf(most) && !any_nan ? most : most + log2f(sum) * kLn2;
        if (k == 0) params_.lse[token] = lse;
      }
    } else {
      most = pick(greatest);
    }
    float score = 0.0f;
    if (present) {
      score = scoring == FLASHMOE_MOE_SIGMOID ? sigmoid(logit)
                                              : numeric::exp2_approx((logit - most) * kLog2E);
    }
    if (scoring == FLASHMOE_MOE_TOPK_SOFTMAX) sum = sum_of_lanes<kTokenLanes>(score);
    if (scoring != FLASHMOE_MOE_SIGMOID) score = present ? score / sum : 0.0f;
    if (params_.renormalize) {
      const float all = sum_of_lanes<kTokenLanes>(score);
      if (all != 0.0f) score /= all;
    }
    return score * params_.scale;
  }

  // The value of this lane's token.
  template <int kTokens>
  static __device__ __forceinline__ float pick(const float (&values)[kTokens]) {
    const int row = lane_index() / (kThreadsPerWarp / kTokens);
    float mine = values[0];
#pragma unroll
    for (int b = 1; b < kTokens; ++b) mine = row == b ? values[b] : mine;
    return mine;
  }

  // Sums over all lanes for each token; a lane gets that of its token. The halves of the warp
  // exchange their values of the tokens that they do not keep. The additions and their order are
  // the same for any number of tokens.
  template <int kTokens>
  static __device__ __forceinline__ float sum_each(float (&values)[kTokens]) {
    int mask = kThreadsPerWarp / 2;
#pragma unroll
    for (int kept = kTokens / 2; kept > 0; kept /= 2, mask /= 2) {
      const bool upper = (lane_index() & mask) != 0;
#pragma unroll
      for (int b = 0; b < kept; ++b) {
        const float kept_value = upper ? values[b + kept] : values[b];
        const float sent_value = upper ? values[b] : values[b + kept];
        values[b] = kept_value + __shfl_xor_sync(kFullWarp, sent_value, mask);
      }
    }
    return sum_of_lanes<kThreadsPerWarp / kTokens>(values[0]);
  }

  // Whether there is a NaN among a token's logits. It only matters if `most` is infinite.
  static __device__ __forceinline__ bool has_nan(const float (&logits)[kPerLane], float most) {
    if (!isinf(most)) return false;
    bool any = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) any |= isnan(logits[j]);
    return __any_sync(kFullWarp, any);
  }

  __device__ __forceinline__ float greatest_logit(const float (&logits)[kPerLane]) const {
    float most = logits[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) most = fmaxf(most, logits[j]);
    return value_of_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(canonical(most))));
  }

  const Params& params_;
  uint32_t* scratch_;
};

// Takes the given choice: as many tokens at a time as have their pairs in 32 lanes.
class GivenChooser {
 public:
  static constexpr int kThreads = 1024;

  static int scratch_words(int, int) { return 0; }

  __device__ __forceinline__ GivenChooser(const Params& params, uint32_t*)
      : params_(params), row_(lane_index() / params.top_k), k_(lane_index() % params.top_k) {}

  template <bool kMany, class Take>
  __device__ __forceinline__ void choose(int token, int end, Take take) {
    const int step = params_.warp_step;
    Given given = load(token, end);
    for (; token < end; token += step) {
      const Given now = given;
      given = load(token + step, end);
      take(choice_of(now, token, end), false);
    }
  }

 private:
  struct Given {
    int64_t id;
    float weight;
  };

  __device__ __forceinline__ bool is_mine(int token, int end) const {
    return row_ < params_.warp_step && token + row_ < end;
  }

  __device__ __forceinline__ Given load(int token, int end) const {
    Given given = {-1, 0.0f};
    if (!is_mine(token, end)) return given;
    const int64_t row = token + row_;
    const int64_t index = row * params_.given_ids_stride + k_;
    given.id = params_.wide_ids ? static_cast<const int64_t*>(params_.given_ids)[index]
                                : static_cast<const int32_t*>(params_.given_ids)[index];
    given.weight = 1.0f;
    if (params_.given_weights != nullptr) {
      given.weight =
          to_float(params_.given_weights, row * params_.given_weights_stride + k_, params_.dtype);
    }
    return given;
  }

  __device__ __forceinline__ Choice choice_of(const Given& given, int token, int end) const {
    Choice choice = {is_mine(token, end) ? token + row_ : -1, k_, -1, 0.0f};
    if (given.id >= 0 && given.id < params_.given_limit) {
      choice.expert =
          params_.expert_map != nullptr ? params_.expert_map[given.id] : static_cast<int>(given.id);
      if (choice.expert >= params_.experts) choice.expert = -1;
    }
    float weight = given.weight;
    if (params_.renormalize) {
      float sum = 0.0f;
      for (int k = 0; k < params_.top_k; ++k) {
        sum += __shfl_sync(kFullWarp, given.weight, row_ * params_.top_k + k);
      }
      if (sum != 0.0f) weight /= sum;
    }
    if (choice.expert < 0) {
      choice.expert = -1;
    } else {
      choice.weight = weight * params_.scale;
    }
    return choice;
  }

  const Params& params_;
  const int row_;  // index of this lane's token among those taken at a time
  const int k_;
};

}  // namespace flashmoe::moe_route
