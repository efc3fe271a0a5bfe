// The consumers of head dimensions whose dK and dV of 64 keys are as much as one warpgroup's
// registers hold. Two blocks, a cluster, share an item of 128 keys and run in step: each has 64 of
// the keys, and half of the columns of dQ of all 128, so that as little is added to the sums as
// with a block of 128 keys. They load the queries for each other, half of the boxes each, and send
// each other dS. Of K of the other's keys a block has the columns that its half of dQ takes.
//
// Both consumers have the same 64 keys. One makes S, P and dV, the other dP, dS and dK, and of dQ
// of the step before each has every second of the block's panels of 32 columns. P goes to the
// second by the buffer in which dS takes its place. The first is most of a step ahead.
//
// One step; [..] runs on the tensor cores meanwhile:
//
//   P, dV:  issue S | slot of the step before [S] | wait S | P = exp2 | wait for dS of the step
//           before, for the buffer | leave P | issue a panel, dV | wait panel | slot [dV] | issue
//           the next panel | wait both
//   dS, dK: issue dP | wait for dS of the step before, issue a panel | wait dP, panel | slot |
//           issue the next panel | wait for P | by 16 queries: make dS, issue dK | send dS [dK] |
//           slot [dK] | wait dK
#pragma once

#include "cuda/attention/sm90_backward/panels.cuh"

namespace flashmoe::sm90_backward {

// Arrives at a barrier of this block and at the same one of the other.
__device__ __forceinline__ void release_to_both(uint32_t barrier) {
  __syncwarp();
  const int lane = lane_index();
  if (lane < 2) ptx::mbarrier_arrive_cluster(ptx::map_to_rank(barrier, lane));
}

template <class Traits>
struct ByProductsConsumer : PanelConsumer<Traits> {
  using Base = PanelConsumer<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dout_parity;
  using Base::dout_stage;
  using Base::index;
  using Base::items;
  using Base::params;
  using Base::parity;
  using Base::shared;
  using Base::stage;
  using Dq = float[Traits::kDqRegisters];
  static_assert(Traits::kCluster == 2);

  template <int kGroup>
  static constexpr int kPanelsOf = (Traits::kBlockPanels + kGroup) / kConsumers;

  static __device__ __forceinline__ uint32_t rank() { return block_rank<Traits>(); }

  __device__ __forceinline__ void wait_for_q() const {
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
  }
  __device__ __forceinline__ void wait_for_dout() const {
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
  }
  // Of both blocks.
  __device__ __forceinline__ void wait_for_ds_before() const {
    const uint32_t before = index - 1;
    ptx::mbarrier_wait_cluster(barriers.ds_full(before & 1), before >> 1 & 1);
  }
  // Tells the other block that dQ was made of dS of the step before.
  __device__ __forceinline__ void give_ds_back() const {
    __syncwarp();
    if (lane_index() == 0) {
      ptx::mbarrier_arrive_cluster(
          ptx::map_to_rank(barriers.ds_taken((index - 1) & 1), rank() ^ 1));
    }
  }

  // A panel of dQ of the step before: of this block's keys, then of the other's.
  __device__ __forceinline__ void issue_dq_panel(Dq& dq, int panel) const {
    constexpr int kPanelsOfBox = kBoxColumns / Traits::kPanelColumns;
    const uint32_t tiles = Base::tiles();
    const uint32_t of_all = rank() * Traits::kBlockPanels + panel;
    const uint32_t box = of_all / kPanelsOfBox;
    const uint32_t within = of_all % kPanelsOfBox * (Traits::kPanelColumns * 2);
    const uint32_t of_other = box - rank() * Traits::kBoxes / 2;
    const uint64_t k = ptx::swizzled_descriptor(
        tiles + Traits::kKOffset + box * Traits::kKeyBoxBytes + within, Traits::kKeyBoxBytes);
    const uint64_t other_k = ptx::swizzled_descriptor(
        tiles + Traits::kOtherKOffset + of_other * Traits::kKeyBoxBytes + within,
        Traits::kKeyBoxBytes);
    const uint64_t ds = ptx::swizzled_descriptor(
        tiles + Traits::kDsOffset + ((index - 1) & 1) * Traits::kDsBytes, Traits::kKeyBoxBytes);
    using QueryMma = typename Base::QueryMma;
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kKeysPerGroup / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, slice * 2048), ptx::advance(k, slice * 2048),
                                slice > 0);
    }
#pragma unroll
    for (int slice = 0; slice < kKeysPerGroup / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, Traits::kGroupBoxBytes + slice * 2048),
                                ptx::advance(other_k, slice * 2048), true);
    }
    ptx::wgmma_commit();
  }

  // dQ of the last step: this consumer's panels.
  __device__ __forceinline__ void make_dq_panels(int panel) {
    wait_for_ds_before();
#pragma unroll 1
    for (; panel < Traits::kBlockPanels; panel += kConsumers) {
      Dq dq;
      issue_dq_panel(dq, panel);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      if (panel + kConsumers >= Traits::kBlockPanels) {
        release(barriers.k_empty());
        give_ds_back();
      }
      Base::hand_over_panel(dq);
    }
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
  static constexpr bool kHolds = kPanels > 1;

  typename Base::Dq dq;  // a panel

  template <bool kFirst>
  __device__ __forceinline__ void take_step(int first_key, bool) {
    uint32_t p[kSlices][4];
    Base::wait_for_q();
    Base::read_row();
    Base::issue_scores();
    if (kHolds && !kFirst) hand_over_held();
    float2 lse[kScores / 4];
    Base::load_lse(lse);
    ptx::wgmma_wait<0>();  // S
    ptx::pin(scores);
    Base::make_p(p, lse, first_key);
    // The buffer was dS of the step before last. The second consumer, who gave out dS behind its
    // dQ, is done with it; so are the other block, which was sent a copy, and behind the named
    // barrier all warps of this consumer.
    if (!kFirst) Base::wait_for_ds_before();
    ptx::mbarrier_wait_cluster(barriers.ds_taken(buffer()), (index >> 1 & 1) ^ 1);
    ptx::named_barrier_sync(kGroupBarrier + kGroup, kThreadsPerGroup);
    if constexpr (Traits::kCapped) {
      Base::leave_factors();
    } else {
      Base::leave_factors(p);
    }
    release(barriers.p_full(buffer()));
    release_to_both(barriers.q_empty(stage()));
    if (!kFirst) Base::issue_dq_panel(dq, kFirstPanel);
    Base::issue_dv(p);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();  // the panel
      ptx::pin(dq);
      if (kPanels == 1) Base::give_ds_back();
      Base::hand_over_panel(dq);
      if constexpr (kPanels > 1) Base::issue_dq_panel(dq, kFirstPanel + kConsumers);
    }
    ptx::wgmma_wait<(!kFirst && kPanels > 1) ? 1 : 0>();  // dV
    ptx::pin(dv);
    release_to_both(barriers.do_empty(dout_stage()));
    if constexpr (!kFirst && kPanels > 1) {
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      Base::give_ds_back();
      holds = 1;
    }
    ++index;
    add = true;
  }
  __device__ __forceinline__ void hand_over_held() {
    if (holds) Base::hand_over_panel(dq);
    holds = 0;
  }

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void give_back_unused() const { release(barriers.k_empty()); }
  __device__ __forceinline__ void finish() {
    if (kHolds) hand_over_held();
    Base::make_dq_panels(kFirstPanel);
  }
  __device__ __forceinline__ void clear_keys() { clear(dv); }
  __device__ __forceinline__ void write_keys() {
    Base::write_keys_by_boxes(params.dv_direct, dv, 1.0f, params.dim_v);
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

  // dS of a step is given out behind dQ of the one before: who sees it in its buffer knows that
  // this consumer is done with the other buffer.
  template <bool kFirst>
  __device__ __forceinline__ void take_step(int first_key, bool last) {
    float dp[kScores];
    typename Base::Dq dq;
    Base::wait_for_dout();
    Base::issue_dp(dp);
    Base::wait_for_q();  // with which the step's first row and delta come
    Base::read_row();
    const bool masked = Traits::kCapped || Base::is_masked(first_key);
    if constexpr (!kFirst) {
      Base::wait_for_ds_before();
      Base::issue_dq_panel(dq, kFirstPanel);
    }
    ptx::wgmma_wait<kFirst ? 0 : 1>();  // dP
    ptx::pin(dp);
    release_to_both(barriers.do_empty(dout_stage()));
    if (last) release(barriers.v_empty());
    if constexpr (!kFirst) {
      ptx::wgmma_wait<0>();  // the panel
      ptx::pin(dq);
      Base::hand_over_panel(dq);
      Base::issue_dq_panel(dq, kFirstPanel + kConsumers);
    }
    ptx::mbarrier_wait(barriers.p_full(buffer()), index >> 1 & 1);
    Base::take_factors();
    issue_dk_of(dp, masked);
    ptx::fence_proxy_async_shared();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();  // the panel
      ptx::pin(dq);
    }
    give_ds();
    if constexpr (!kFirst) {
      Base::give_ds_back();
      Base::hand_over_panel(dq);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release_to_both(barriers.q_empty(stage()));
    ++index;
    add = true;
  }

  // This warp's rows of dS, to both blocks. Its place in the other one is free: the first consumer
  // has waited for that before it left P.
  __device__ __forceinline__ void give_ds() const {
    constexpr int kBytes = Traits::kGroupBoxBytes / 4;
    __syncwarp();
    if (lane_index() != 0) return;
    const uint32_t from =
        shared + Traits::kDsOffset + buffer() * Traits::kDsBytes + warp_of_group() * kBytes;
    const uint32_t other = Base::rank() ^ 1;
    const uint32_t full = ptx::map_to_rank(barriers.ds_full(buffer()), other);
    ptx::mbarrier_arrive_expect_cluster(full, kBytes);
    ptx::bulk_copy_to_rank(ptx::map_to_rank(from + Traits::kGroupBoxBytes, other), from, kBytes,
                           full);
    ptx::mbarrier_arrive(barriers.ds_full(buffer()));
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
  __device__ __forceinline__ void finish() { Base::make_dq_panels(kFirstPanel); }
  __device__ __forceinline__ void clear_keys() { clear(dk); }
  __device__ __forceinline__ void write_keys() {
    Base::write_keys_by_boxes(params.dk_direct, dk, params.scale, params.dim);
  }
};

}  // namespace flashmoe::sm90_backward
