// What a consumer warpgroup makes of the products S and dP, element by element: masks, P, and dS.
#pragma once

#include "cuda/attention/sm90_backward/consumer_state.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::length_k_of;

template <class Traits>
struct Probabilities : ConsumerState<Traits> {
  using Base = ConsumerState<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::ds;
  using Base::group;
  using Base::held_item;
  using Base::key_group;
  using Base::kScores;
  using Base::kSlices;
  using Base::matrix_row;
  using Base::params;
  using Base::row;
  using Base::scores;
  using Base::shared;
  using Base::stage;
  using Base::swizzled_chunk;
  using typename Base::Element;
  using typename Base::Numeric;
  using typename Base::SharedItem;

  // Returns this thread's queries of a step that lie before `end`, as the lowest bits of a word.
  // The thread's queries are 2 (lane % 4) + 8 i and the one after it, for every i.
  static __device__ __forceinline__ uint32_t queries_before(int end, int lane) {
    const int within = max(0, end - 2 * (lane % 4));
    const int queries = within / 8 * 2 + min(within % 8, 2);
    return queries >= 32 ? ~0u : (1u << queries) - 1;
  }

  // Tells whether some query of the step does not see all of this consumer's keys. Rows after the
  // last one have an lse of infinity.
  __device__ __forceinline__ bool is_masked(int first_key) const {
    if constexpr (Traits::kRagged) {
      return has_duty(kMaskedDuty);
    } else {
      const int last_row = min(row + Traits::kTileQ, params.seq_q) - 1;
      return params.score.first_key(last_row) > first_key ||
             params.score.end_key(row, params.seq_k) < first_key + kKeysPerGroup;
    }
  }

  // Tells whether the producer found this duty in a step of a sequence.
  __device__ __forceinline__ bool has_duty(uint32_t duty) const {
    return (ptx::load_shared_uint(barriers.stage_row(stage())) & duty << group) != 0;
  }

  // Tells whether no query of the step sees a key of this consumer. With 128 queries that is seldom
  // so.
  __device__ __forceinline__ bool is_unseen(int first_key) const {
    if constexpr (Traits::kTileQ != kKeysPerGroup) {
      return false;
    } else if constexpr (Traits::kRagged) {
      return has_duty(kUnseenDuty);
    } else {
      const int last_row = min(row + Traits::kTileQ, params.seq_q) - 1;
      return params.score.end_key(last_row, params.seq_k) <= first_key ||
             params.score.first_key(row) >= first_key + kKeysPerGroup;
    }
  }

  // Returns the queries of the step that see a key of this thread, as bits in the order of
  // queries_before.
  __device__ __forceinline__ uint32_t seen_by(int first_key, int half) const {
    static_assert(kScores / 2 <= 32, "a bit for each query of a key");
    const int lane = lane_index();
    const int key = first_key + warp_of_group() * 16 + lane / 4 + 8 * half;
    const SharedItem& item = held_item();
    if (key >= length_k_of(params, item)) return 0;
    return queries_before(attention_backward::end_query_of(params, item, key) - row, lane) &
           ~queries_before(attention_backward::first_query_of(params, item, key) - row, lane);
  }

  // Sets the scores from kBegin to before kEnd to `hidden` where the query does not see the key or
  // the key does not exist. Probabilities become 0, or their powers -inf.
  template <int kBegin = 0, int kEnd = kScores>
  __device__ __forceinline__ void mask(int first_key, float hidden = 0.0f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t seen = seen_by(first_key, half);
#pragma unroll
      for (int i = kBegin / 2; i < kEnd / 2; ++i) {
        float& score = scores[i / 2 * 4 + 2 * half + i % 2];
        if ((seen & (1u << i)) == 0) score = hidden;
      }
    }
  }

  // Loads lse of this thread's queries of the step that these scores belong to.
  template <int kBegin = 0, int kEnd = kScores>
  __device__ __forceinline__ void load_lse(float2 (&lse)[kScores / 4]) const {
    const uint32_t rows =
        shared + Traits::kLseOffset + stage() * Traits::kRowBytes + lane_index() % 4 * 8;
#pragma unroll
    for (int i = kBegin / 4; i < kEnd / 4; ++i) lse[i] = ptx::load_shared_float2(rows + 32 * i);
  }

  // Computes P = exp2(S scale_log2 - lse) of these scores.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void exponentiate(const float2 (&lse)[kScores / 4]) {
    const float scale_log2 = params.score.scale_log2;
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const float2& of_rows = lse[i / 4];
      scores[i] =
          numeric::exp2_approx(fmaf(scores[i], scale_log2, -(i % 2 == 0 ? of_rows.x : of_rows.y)));
    }
  }

  // Does the same for capped scores t = tanh(S cap_ratio). It leaves P (1 - t^2) in scores.
  __device__ __forceinline__ void exponentiate_capped(uint32_t (&p)[kSlices][4],
                                                      const float2 (&lse)[kScores / 4],
                                                      int first_key) {
    const float scale_log2 = params.score.scale_log2;
    const uint32_t seen[2] = {seen_by(first_key, 0), seen_by(first_key, 1)};
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float probability[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * i + 2 * half + e];
          params.score.template cap<Softcap::kBrief>(score);
          probability[e] =
              numeric::exp2_approx(fmaf(score, scale_log2, -(e == 0 ? lse[i].x : lse[i].y)));
          if ((seen[half] & (1u << (2 * i + e))) == 0) probability[e] = 0.0f;
          score = probability[e] * fmaf(-score, score, 1.0f);
        }
        p[i / 2][i % 2 * 2 + half] = Numeric::pack(probability[0], probability[1]);
      }
    }
  }

  static __device__ __forceinline__ void pack(uint32_t (&packed)[kSlices][4],
                                              const float (&values)[kScores]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        packed[slice][r] = Numeric::pack(values[8 * slice + 2 * r], values[8 * slice + 2 * r + 1]);
      }
    }
  }

  // Returns what dP - delta of two neighbouring scores is multiplied by. That is P, unless there is
  // a softcap.
  __device__ __forceinline__ float2 factors(uint32_t packed, int pair) const {
    if constexpr (Traits::kUnpacksP) {
      return Numeric::unpack(packed);
    } else {
      return make_float2(scores[2 * pair], scores[2 * pair + 1]);
    }
  }

  // Loads delta of this thread's queries of a slice.
  static __device__ __forceinline__ void load_delta(float2 (&delta)[2], uint32_t rows) {
    delta[0] = ptx::load_shared_float2(rows);
    delta[1] = ptx::load_shared_float2(rows + 32);
  }

  // Makes dS = P (dP - delta) of 16 queries, in registers and in shared memory. Where a query does
  // not see a key, P is 0, but dP - delta may be NaN.
  __device__ __forceinline__ void make_ds(int slice, const float (&dp)[kScores],
                                          const uint32_t (&p)[4], const float2 (&delta)[2],
                                          bool masked) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = 4 * slice + 2 * i + half;
        const uint32_t packed = p[2 * i + half];
        const float2 difference =
            make_float2(dp[2 * pair] - delta[i].x, dp[2 * pair + 1] - delta[i].y);
        if constexpr (Traits::kMultipliesPairs) {
          ds[slice][2 * i + half] =
              numeric::multiply<Element>(packed, Numeric::pack(difference.x, difference.y));
        } else {
          const float2 factor = factors(packed, pair);
          ds[slice][2 * i + half] = Numeric::pack(factor.x * difference.x, factor.y * difference.y);
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int r = 0; r < 4; ++r) ds[slice][r] &= numeric::mask_of_nonzero<Element>(p[r]);
    }
    ptx::stmatrix_x4(ds_row() + slice / 4 * Traits::kKeyBoxBytes + swizzled_chunk(slice),
                     ds[slice][0], ds[slice][1], ds[slice][2], ds[slice][3]);
  }

  // Returns the row of this step's buffer of dS whose chunks this lane's stmatrix stores.
  __device__ __forceinline__ uint32_t ds_row() const {
    return shared + Traits::kDsOffset + buffer() * Traits::kDsBytes +
           key_group() * Traits::kGroupBoxBytes + matrix_row() * kBoxRowBytes;
  }
};

}  // namespace flashmoe::sm90_backward
