// The consumers of head dimensions whose dK and dV of 64 keys are as much as one warpgroup's
// registers hold. Both have the same 64 keys. One makes S, P and dV, the other dP, dS and dK, and
// of dQ of the step before each has every second panel of 64 columns. P goes to the second by the
// buffer in which dS takes its place. The first is most of a step ahead of the second.
//
// One step; [..] runs on the tensor cores meanwhile:
//
//   P, dV:  issue S | slot of the step before [S] | wait for dS of the step before, issue a panel |
//           wait S | P = exp2 [panel] | issue dV | wait panel | slot [dV] | issue the next panel |
//           wait both
//   dS, dK: wait for dS of the step before, issue a panel, dP | wait panel | slot [dP] |
//           issue the next panel | wait dP, for P | by 16 queries: make dS, issue dK | slot [dK] |
//           wait dK
#pragma once

#include "cuda/attention/sm90_backward/panels.cuh"

namespace flashmoe::sm90_backward {

template <class Traits>
struct ByProductsConsumer : PanelConsumer<Traits> {
  using Base = PanelConsumer<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::dout_parity;
  using Base::dout_stage;
  using Base::index;
  using Base::items;
  using Base::params;
  using Base::parity;
  using Base::stage;
  using Dq = float[Traits::kDqRegisters];

  template <int kGroup>
  static constexpr int kPanelsOf = (Traits::kPanels + kGroup) / kConsumers;

  __device__ __forceinline__ void wait_for_q() const {
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
  }
  __device__ __forceinline__ void wait_for_dout() const {
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
  }
};

template <class Traits>
struct ValueConsumer : ByProductsConsumer<Traits> {
  using Base = ByProductsConsumer<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dout_stage;
  using Base::dv;
  using Base::holds;
  using Base::index;
  using Base::kScores;
  using Base::kSlices;
  using Base::params;
  using Base::scores;
  using Base::stage;

  static constexpr int kGroup = 0;
  static constexpr int kFirstPanel = 1;
  static constexpr int kPanels = Base::template kPanelsOf<kGroup>;
  static_assert(kPanels == 1 || kPanels == 2);
  // The last panel is handed over in the next step, under S.
  static constexpr bool kHolds = kPanels > 1 && !Traits::kCapped;

  typename Base::Dq beside_scores;  // a panel of dQ

  template <bool kFirst>
  __device__ __forceinline__ void take_step(int first_key, bool) {
    auto& dq = Traits::kCapped ? scores : beside_scores;
    uint32_t p[kSlices][4];
    Base::wait_for_q();
    Base::read_row();
    Base::issue_scores();
    if (kHolds && !kFirst) hand_over_held();
    float2 lse[kScores / 4];
    Base::load_lse(lse);
    if constexpr (!kFirst) {
      Base::wait_for_ds_before();
      if (!Traits::kCapped) Base::issue_dq_panel(dq, kFirstPanel);
    }
    ptx::wgmma_wait<kFirst || Traits::kCapped ? 0 : 1>();  // S
    ptx::pin(scores);
    Base::make_p(p, lse, first_key);
    // The buffer was dS of the step before last: all warps of this consumer are done with it.
    ptx::named_barrier_sync(kGroupBarrier + kGroup, kThreadsPerGroup);
    if constexpr (Traits::kCapped) {
      Base::leave_factors();
      // A softcap leaves too few registers for it before.
      if (!kFirst) Base::issue_dq_panel(dq, kFirstPanel);
    } else {
      Base::leave_factors(p);
    }
    release(barriers.p_full(buffer()));
    release(barriers.q_empty(stage()));
    Base::issue_dv(p);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();  // the panel
      ptx::pin(dq);
      Base::hand_over_panel(dq);
      if constexpr (kPanels > 1) Base::issue_dq_panel(dq, kFirstPanel + kConsumers);
    }
    ptx::wgmma_wait<(!kFirst && kPanels > 1) ? 1 : 0>();  // dV
    ptx::pin(dv);
    release(barriers.do_empty(dout_stage()));
    if constexpr (!kFirst && kPanels > 1) {
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      if (kHolds) {
        holds = 1;
      } else {
        Base::hand_over_panel(dq);
      }
    }
    ++index;
    add = true;
  }
  __device__ __forceinline__ void hand_over_held() {
    if (holds) Base::hand_over_panel(beside_scores);
    holds = 0;
  }

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void give_back_unused() const { release(barriers.k_empty()); }
  __device__ __forceinline__ void finish() {
    if (kHolds) hand_over_held();
    Base::wait_for_ds_before();
    Base::make_dq_panels(kFirstPanel, [this] { release(barriers.k_empty()); });
  }
  __device__ __forceinline__ void clear_keys() { clear(dv); }
  __device__ __forceinline__ void write_keys() {
    Base::write_keys_by_boxes(params.dv_direct, dv, 1.0f, params.dim_v);
    Base::template check_keys<Wanted::kDv>(dv);
  }
};

template <class Traits>
struct KeyConsumer : ByProductsConsumer<Traits> {
  using Base = ByProductsConsumer<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dk;
  using Base::dout_stage;
  using Base::ds;
  using Base::index;
  using Base::items;
  using Base::kScores;
  using Base::kSlices;
  using Base::params;
  using Base::shared;
  using Base::stage;
  using typename Base::KeyMma;

  static constexpr int kGroup = 1;
  static constexpr int kFirstPanel = 0;
  static constexpr int kPanels = Base::template kPanelsOf<kGroup>;
  static_assert(kPanels == 2);

  // dS of a step comes behind dQ of the one before: who sees it in its buffer knows that the other
  // buffer is free.
  template <bool kFirst>
  __device__ __forceinline__ void take_step(int first_key, bool last) {
    float dp[kScores];
    typename Base::Dq dq;
    if constexpr (!kFirst) {
      Base::wait_for_ds_before();
      Base::issue_dq_panel(dq, kFirstPanel);
    }
    Base::wait_for_dout();
    Base::issue_dp(dp);
    Base::wait_for_q();  // with which the step's first row and delta come
    Base::read_row();
    const bool masked = Traits::kCapped || Base::is_masked(first_key);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();  // the panel
      ptx::pin(dq);
      Base::hand_over_panel(dq);
      Base::issue_dq_panel(dq, kFirstPanel + kConsumers);
    }
    ptx::wgmma_wait<kFirst ? 0 : 1>();  // dP
    ptx::pin(dp);
    release(barriers.do_empty(dout_stage()));
    if (last) release(barriers.v_empty());
    ptx::mbarrier_wait(barriers.p_full(buffer()), index >> 1 & 1);
    Base::take_factors();
    issue_dk_of(dp, masked);
    ptx::fence_proxy_async_shared();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();  // the panel
      ptx::pin(dq);
    }
    release(barriers.ds_full(buffer()));
    if constexpr (!kFirst) Base::hand_over_panel(dq);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release(barriers.q_empty(stage()));
    ++index;
    add = true;
  }

  // dS of P, and dK += dS^T Q: dS of a slice is made between the products of those before.
  __device__ __forceinline__ void issue_dk_of(const float (&dp)[kScores], bool masked) {
    const uint64_t q = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + stage() * Traits::kQBytes, Traits::kQueryBoxBytes);
    const uint32_t rows = Base::delta_rows();
    float2 delta[2];
    Base::load_delta(delta, rows);
    ptx::pin(dk);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const float2 of_rows[2] = {delta[0], delta[1]};
      if (slice + 1 < kSlices) Base::load_delta(delta, rows + 64 * (slice + 1));
      const uint32_t p[4] = {ds[slice][0], ds[slice][1], ds[slice][2], ds[slice][3]};
      Base::make_ds(slice, dp, p, of_rows, masked);
      ptx::pin(ds[slice]);
      ptx::wgmma_fence();
      KeyMma::multiply_values(dk, ds[slice], ptx::advance(q, slice * 2048),
                              slice > 0 || Base::adds());
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void begin() const {
    ptx::mbarrier_wait(barriers.v_full(), items & 1);
  }
  __device__ __forceinline__ void give_back_unused() const {
    release(barriers.k_empty());
    release(barriers.v_empty());
  }
  __device__ __forceinline__ void finish() {
    Base::wait_for_ds_before();
    Base::make_dq_panels(kFirstPanel, [this] { release(barriers.k_empty()); });
  }
  __device__ __forceinline__ void clear_keys() { clear(dk); }
  __device__ __forceinline__ void write_keys() {
    Base::write_keys_by_boxes(params.dk_direct, dk, params.scale, params.dim);
    Base::template check_keys<Wanted::kDk>(dk);
  }
};

}  // namespace flashmoe::sm90_backward
