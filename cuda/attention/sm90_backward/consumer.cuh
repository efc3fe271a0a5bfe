// The consumers of head dimensions up to 128: a warpgroup that has 64 keys of each item. Its loop
// over items and steps is here. It combines products (products.cuh) and what is made of them
// (probabilities.cuh), and hands over gradients (gradients.cuh).
#pragma once

#include "cuda/attention/sm90_backward/gradients.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::sm90_backward {

template <class Traits>
struct Consumer : Gradients<Traits> {
  using Base = Gradients<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::clear_keys;
  using Base::dk;
  using Base::dout_parity;
  using Base::dout_stage;
  using Base::ds_row;
  using Base::dv;
  using Base::exponentiate_capped;
  using Base::group;
  using Base::hand_over_dq;
  using Base::index;
  using Base::is_masked;
  using Base::is_unseen;
  using Base::issue_dp;
  using Base::issue_dq;
  using Base::issue_dv_and_dk;
  using Base::issue_scores;
  using Base::items;
  using Base::kScores;
  using Base::kSlices;
  using Base::pack;
  using Base::params;
  using Base::parity;
  using Base::row;
  using Base::scores;
  using Base::shared_items;
  using Base::stage;
  using Base::store_dq;
  using Base::swizzled_chunk;
  using Base::write_keys;
  using typename Base::Item;

  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(barriers.k_full(), items & 1);
      const Item* const shared_item = shared_items + items % kItemsHeld;
      Item item;
      item.tile = __shfl_sync(kFullWarp, shared_item->tile, 0);
      item.begin = __shfl_sync(kFullWarp, shared_item->begin, 0);
      item.end = __shfl_sync(kFullWarp, shared_item->end, 0);
      item.course = __shfl_sync(kFullWarp, shared_item->course, 0);
      if (item.tile == kNoItem) break;
      const Steps steps(item, params.heads_per_kv);
      if (steps.left == 0) {
        release(barriers.k_empty());
        release(barriers.v_empty());
        clear_keys();
      } else {
        compute(steps, runs_down(item), item.tile * Traits::kTileK + group * kKeysPerGroup);
      }
      write_keys();
      ++items;
    }
  }

  template <bool kFirst>
  __device__ __forceinline__ void take_step(const Steps& steps, int first_key) {
    row = steps.tile_q * Traits::kTileQ;
    const bool last = steps.left == 1;
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
    if (is_unseen(first_key)) {
      skip<kFirst>(last);
    } else {
      step<kFirst>(first_key, last);
    }
  }

  __device__ __forceinline__ void compute(Steps steps, bool down, int first_key) {
    add = false;
    ptx::mbarrier_wait(barriers.v_full(), items & 1);
    take_step<true>(steps, first_key);
#pragma unroll 1
    while (steps.left > 1) {
      steps.advance(down, params.heads_per_kv);
      take_step<false>(steps, first_key);
    }
    finish();
    if (!add) clear_keys();
  }

  // Computes a whole step except its dQ, and dQ of the step before. No product is under way before
  // it or after it.
  template <bool kFirst>
  __device__ __forceinline__ void step(int first_key, bool last) {
    float dp[kScores];
    float dq[Traits::kDqRegisters];
    uint32_t p[kSlices][4];
    float2 lse[kScores / 4];
    constexpr int kEarly = Traits::kEarlyPowers;
    constexpr int kHeld = kEarly < kScores ? kEarly / 2 : kScores;
    this->template load_lse<0, kEarly>(lse);
    issue_scores();
    if (!kFirst) issue_dq_before(dq);
    // With a softcap there is no register for the answer.
    const bool masked = Traits::kCapped || is_masked(first_key);
    ptx::wgmma_wait<kFirst ? 0 : 1>();  // S
    ptx::pin(scores);
    if constexpr (Traits::kCapped) {
      exponentiate_capped(p, lse, first_key);
    } else {
      this->template exponentiate<0, kEarly>(lse);
      if (masked) this->template mask<0, kHeld>(first_key);
      if (kEarly == kScores) pack(p, scores);
    }
    if (!kFirst) {
      ptx::wgmma_wait<0>();  // dQ
      ptx::pin(dq);
      store_dq(dq);
    }
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    issue_dp(dp);
    if (kEarly < kScores) this->template load_lse<kEarly, kScores>(lse);
    if (!kFirst) hand_over_dq();
    if constexpr (kEarly < kScores) {
      // Some masks are put off to here. Without a branch, ptxas would put exponentials between the
      // products of dP.
      if (masked) this->template mask<kHeld, kEarly>(first_key);
      this->template exponentiate<kEarly, kScores>(lse);
      if (masked) this->template mask<kEarly, kScores>(first_key);
      pack(p, scores);
    }
    ptx::wgmma_wait<0>();  // dP
    ptx::pin(dp);
    if (last) release(barriers.v_empty());
    issue_dv_and_dk(dp, p, masked);
    ptx::fence_proxy_async_shared();
    release(barriers.ds_full(buffer()));
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(dk);
    release(barriers.do_empty(dout_stage()));  // delta came with dO
    release(barriers.q_empty(stage()));
    ++index;
    add = true;
  }

  // Does a step in which dS is zero.
  template <bool kFirst>
  __device__ __forceinline__ void skip(bool last) {
    if constexpr (!kFirst) {
      float dq[Traits::kDqRegisters];
      issue_dq_before(dq);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      store_dq(dq);
      hand_over_dq();
    }
    // Phases are waited for one by one.
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    if (last) release(barriers.v_empty());
    end_skipped();
  }

  // Issues dQ of the step before.
  __device__ __forceinline__ void issue_dq_before(float (&dq)[Traits::kDqRegisters]) {
    const uint32_t before = index - 1;
    ptx::mbarrier_wait(barriers.ds_full(before & 1), before >> 1 & 1);
    issue_dq(dq, before & 1);
  }

  // Does what is left of the last step.
  __device__ __forceinline__ void finish() {
    float dq[Traits::kDqRegisters];
    issue_dq_before(dq);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(barriers.k_empty());
    store_dq(dq);
    hand_over_dq();
  }

  // Ends a step in which dS is zero.
  __device__ __forceinline__ void end_skipped() {
    const uint32_t store = ds_row();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::stmatrix_x4(store + slice / 4 * Traits::kKeyBoxBytes + swizzled_chunk(slice), 0, 0, 0,
                       0);
    }
    ptx::fence_proxy_async_shared();
    release(barriers.ds_full(buffer()));
    release(barriers.do_empty(dout_stage()));
    release(barriers.q_empty(stage()));
    ++index;
  }
};

}  // namespace flashmoe::sm90_backward
