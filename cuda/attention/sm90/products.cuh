// The products of a consumer warpgroup: the scores Q K^T with their softcap and mask, and P V.
#pragma once

#include "cuda/attention/sm90/consumer_state.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/score_fragments.cuh"

namespace flashmoe::sm90 {

template <class Traits>
struct Products : ConsumerState<Traits> {
  using Base = ConsumerState<Traits>;
  using Base::add;
  using Base::Base;
  using Base::group;
  using Base::k_descriptor;
  using Base::k_pipe;
  using Base::kScores;
  using Base::kSlices;
  using Base::out;
  using Base::p;
  using Base::params;
  using Base::q_descriptor;
  using Base::q_stage;
  using Base::release_v;
  using Base::scores;
  using Base::sequence;
  using Base::shared;
  using Base::v_descriptor;
  using Base::v_pipe;
  using typename Base::Element;
  using typename Base::Fragments;
  using typename Base::Numeric;
  using typename Base::ValueMma;

  // Issues scores = Q K^T for the first kKeys keys of a step.
  template <int kKeys>
  __device__ __forceinline__ void issue_scores(float (&of_keys)[kKeys / 2]) {
    const uint64_t q = ptx::advance(q_descriptor, q_stage() * Traits::kQBytes);
    const uint64_t k = ptx::advance(k_descriptor, k_pipe.stage * Traits::kKBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
      const int box = slice / 4;
      const int within = slice % 4 * 32;
      ptx::Wgmma<Element, kKeys>::multiply(
          of_keys, ptx::advance(q, box * Traits::kRowBoxBytes + within),
          ptx::advance(k, box * Traits::kKVBoxBytes + within), slice > 0);
    }
    ptx::wgmma_commit();
  }

  // Issues out += P V for the values of a stage, or out = P V unless `add_up`.
  __device__ __forceinline__ void issue_values(const uint32_t (&p_of_step)[kSlices][4], int stage,
                                               bool add_up) {
    const uint64_t v = ptx::advance(v_descriptor, stage * Traits::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ValueMma::multiply_values(out, p_of_step[slice], ptx::advance(v, slice * 2048),
                                slice > 0 || add_up);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_values() {
    issue_values(p, v_pipe.stage, add);
    add = true;
  }

  static __device__ __forceinline__ void pack(const float (&scores)[kScores],
                                              uint32_t (&p)[kSlices][4]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        p[slice][r] = Numeric::pack(scores[8 * slice + 2 * r], scores[8 * slice + 2 * r + 1]);
      }
    }
  }

  // Returns this thread's keys of a step that lie before `end`, as the lowest bits of a word. The
  // thread's keys are 2 (lane % 4) + 8 i and the one after it, for every i.
  static __device__ __forceinline__ uint32_t keys_before(int end, int lane) {
    const int within = max(0, end - 2 * (lane % 4));
    const int keys = within / 8 * 2 + min(within % 8, 2);
    return keys >= 32 ? ~0u : (1u << keys) - 1;
  }

  // Hides the keys that a row does not see in the step that begins with `key`.
  __device__ __forceinline__ void mask(int group_row, int key, float (&scores)[kScores]) const {
    static_assert(kScores / 2 <= 32, "a bit for each key of a row");
    const int lane = lane_index();
    const int first_row = warp_of_group() * 16 + lane / 4;
    mask_scores<Fragments>(scores, [&](int half) {
      const int row = query_of<Traits>(params, group_row, first_row + 8 * half);
      const uint32_t seen = keys_before(sequence().end_key(params.score, row) - key, lane) &
                            ~keys_before(sequence().first_key(params.score, row) - key, lane);
      return [seen](int i) { return (seen & (1u << i)) != 0; };
    });
  }

  // Applies the softcap and the mask to Q K^T.
  __device__ __forceinline__ void cap_and_mask(int group_row, int key, bool masked) {
    if constexpr (Traits::kCapped) params.score.template cap<Softcap::kBrief>(scores);
    if (masked) mask(group_row, key, scores);
  }

  // Computes the scores of this warp's rows again, without the other warps of the group.
  __device__ __forceinline__ void compute_scores_again() {
    const int lane = lane_index();
    const int q_row = warp_of_group() * 16 + lane % 16;
    const int k_row = lane / 16 * 8 + lane % 8;
    const uint32_t q =
        shared + Traits::kQOffset + q_stage() * Traits::kQBytes + group * Traits::kQBytesPerGroup;
    const uint32_t k = shared + Traits::kKOffset + k_pipe.stage * Traits::kKBytes;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
      const int box = slice / 4;
      const int chunk = slice % 4 * 2;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, q + box * Traits::kRowBoxBytes + q_row * kBoxRowBytes +
                              ((chunk + lane / 16) ^ (q_row % 8)) * 16);
#pragma unroll
      for (int keys = 0; keys < Traits::kStepKeys / 16; ++keys) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k + box * Traits::kKVBoxBytes + (16 * keys + k_row) * kBoxRowBytes +
                                ((chunk + lane / 8 % 2) ^ (k_row % 8)) * 16);
#pragma unroll
        for (int tile8 = 0; tile8 < 2; ++tile8) {
          float d[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) d[i] = scores[8 * keys + 4 * tile8 + i];
          ptx::mma_m16n8k16<Element>(d, a, b[2 * tile8], b[2 * tile8 + 1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[8 * keys + 4 * tile8 + i] = d[i];
        }
      }
    }
  }

  // Waits for P V. ptxas would move this wait before the exponentials, which should run under P V.
  // It does not move the wait across a branch that depends on all of them through their sums. The
  // branch is never taken.
  __device__ __forceinline__ void wait_for_values(const float (&sums)[2]) {
    if (__any_sync(kFullWarp, sums[0] + sums[1] < 0.0f)) __trap();
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
  }
};

}  // namespace flashmoe::sm90
