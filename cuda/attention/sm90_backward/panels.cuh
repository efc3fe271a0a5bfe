// Consumers of head dimensions above 128. They have no registers for dQ beside the other products
// of a step. So dQ is made and leaves in panels of 64 columns, by a slot of 16 KiB for each
// consumer. In PanelConsumer, which serves 192/128, S, dP and dQ take turns in one array:
//
//   issue S | wait | P = exp2 | issue dV of 32 queries, dP, dV of the others | wait for dP | dS of
//   32 queries [dV] | wait | dS of the others | issue a panel of dQ of the step before, dK | wait
//   for the panel | slot [dK] | wait | of every second step the other panel | slot
//
// dS takes the place of P, so it is made only of queries whose dV is done.
#pragma once

#include "cuda/attention/sm90_backward/consumer.cuh"
#include "cuda/ptx/hold.cuh"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashmoe::sm90_backward {

template <int kCount>
__device__ __forceinline__ void clear(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = 0.0f;
}

template <class Traits>
struct PanelConsumer : Consumer<Traits> {
  using Base = Consumer<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dk;
  using Base::dout_parity;
  using Base::dout_stage;
  using Base::ds;
  using Base::ds_row;
  using Base::dv;
  using Base::group;
  using Base::holds;
  using Base::index;
  using Base::items;
  using Base::key_group;
  using Base::kScores;
  using Base::kSlices;
  using Base::params;
  using Base::parity;
  using Base::row;
  using Base::scores;
  using Base::shared;
  using Base::shared_items;
  using Base::slot_uses;
  using Base::stage;
  using Base::swizzled_chunk;
  using typename Base::KeyMma;
  using typename Base::Numeric;
  using typename Base::ValueMma;

  // Where there is no register for a flag, dk and dv begin with zeros.
  static constexpr bool kAlwaysAdds = Traits::kCapped;
  __device__ __forceinline__ bool adds() const { return kAlwaysAdds || add; }

  // Returns this consumer's first key of a tile of keys.
  __device__ __forceinline__ int first_key_of(int tile) const {
    const int group_of_tile = Traits::kByProducts ? block_rank<Traits>() : group;
    return tile * Traits::kTileK + group_of_tile * kKeysPerGroup;
  }

  // The row is read where it is used: it would cost a register.
  __device__ __forceinline__ void read_row() {
    row = static_cast<int>(ptx::load_shared_uint(barriers.stage_row(stage())));
  }

  // These slices of 16 queries have their dV issued ahead of dP. With a softcap, dS comes from
  // factors that take the place of P, all at once.
  static constexpr int kEarlySlices = Traits::kCapped ? kSlices : kSlices / 2;

  // Issues dV += P^T dO for slices from kBegin to before kEnd. dO is there.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void issue_dv(uint32_t (&p)[kSlices][4]) {
    const uint64_t dout = ptx::swizzled_descriptor(
        shared + Traits::kDoOffset + dout_stage() * Traits::kDoBytes, Traits::kQueryBoxBytes);
    ptx::pin(dv);
#pragma unroll
    for (int slice = kBegin; slice < kEnd; ++slice) ptx::pin(p[slice]);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = kBegin; slice < kEnd; ++slice) {
      ValueMma::multiply_values(dv, p[slice], ptx::advance(dout, slice * 2048),
                                slice > 0 || adds());
    }
    ptx::wgmma_commit();
  }

  // Issues dK += dS^T Q.
  __device__ __forceinline__ void issue_dk() {
    const uint64_t q = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + stage() * Traits::kQBytes, Traits::kQueryBoxBytes);
    ptx::pin(dk);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) ptx::pin(ds[slice]);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      KeyMma::multiply_values(dk, ds[slice], ptx::advance(q, slice * 2048), slice > 0 || adds());
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void load_rows(float2 (&lse)[kScores / 4]) {
    Base::load_lse(lse);
    read_row();
  }

  // Makes packed P from powers. Masks come first, and no branch lies between: exponentials and
  // packing are to alternate, since each waits for its unit.
  __device__ __forceinline__ void make_p_of_powers(uint32_t (&p)[kSlices][4], int first_key) {
    if (Base::is_masked(first_key)) Base::mask(first_key, -INFINITY);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      p[i / 4][i % 4] = Numeric::pack(numeric::exp2_approx(scores[2 * i]),
                                      numeric::exp2_approx(scores[2 * i + 1]));
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::hold(p[slice], shared, params.seq_q < 0);
    }
  }

  // Makes packed P. With a softcap, scores then hold what the cap leaves of P.
  __device__ __forceinline__ void make_p(uint32_t (&p)[kSlices][4],
                                         const float2 (&lse)[kScores / 4], int first_key) {
    if constexpr (Traits::kCapped) {
      Base::exponentiate_capped(p, lse, first_key);
    } else {
      const float scale_log2 = params.score.scale_log2;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float2& of_rows = lse[i / 4];
        scores[i] = fmaf(scores[i], scale_log2, -(i % 2 == 0 ? of_rows.x : of_rows.y));
      }
      make_p_of_powers(p, first_key);
    }
  }

  // What dP - delta is multiplied by lies in the place of dS until dS is made. It is P, or P times
  // what a softcap leaves. Each warp leaves and takes its own rows.
  __device__ __forceinline__ void leave_factors(const uint32_t (&p)[kSlices][4]) const {
    const uint32_t store = ds_row();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::stmatrix_x4(store + swizzled_chunk(slice), p[slice][0], p[slice][1], p[slice][2],
                       p[slice][3]);
    }
  }
  __device__ __forceinline__ void leave_factors() const {
    const uint32_t store = ds_row();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t packed[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        packed[r] = Numeric::pack(scores[8 * slice + 2 * r], scores[8 * slice + 2 * r + 1]);
      }
      ptx::stmatrix_x4(store + swizzled_chunk(slice), packed[0], packed[1], packed[2], packed[3]);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void take_factors() {
    const uint32_t load = ds_row();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::ldmatrix_x4(ds[slice], load + swizzled_chunk(slice));
    }
    __syncwarp();
  }

  // Returns where delta of the first of this thread's queries lies.
  __device__ __forceinline__ uint32_t delta_rows() const {
    const uint32_t of_delta = Traits::kDeltaWithQ ? stage() : dout_stage();
    return shared + Traits::kDeltaOffset + of_delta * Traits::kRowBytes + lane_index() % 4 * 8;
  }

  // Makes dS of slices from kBegin to before kEnd.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void make_ds_of(const float (&dp)[kScores],
                                             const uint32_t (&p)[kSlices][4], bool masked) {
    const uint32_t rows = delta_rows();
#pragma unroll
    for (int slice = kBegin; slice < kEnd; ++slice) {
      float2 delta[2];
      Base::load_delta(delta, rows + 64 * slice);
      const uint32_t of_slice[4] = {p[slice][0], p[slice][1], p[slice][2], p[slice][3]};
      Base::make_ds(slice, dp, of_slice, delta, masked);
    }
  }

  __device__ __forceinline__ uint32_t own_slot() const {
    return shared + Traits::kSlotOffset + group * Traits::kSlotBytes;
  }
  __device__ __forceinline__ void wait_for_own_slot() {
    ptx::mbarrier_wait(barriers.slot_ready(group), slot_uses & 1);
    ++slot_uses;
  }

  __device__ __forceinline__ void hand_over_panel(float (&dq)[Traits::kDqRegisters]) {
    wait_for_own_slot();
    Base::fill_with_dq(dq, group, own_slot());
    Base::fill_slot(group);
  }

  // Computes a whole step except its dQ, and dQ of the step before. No product is under way before
  // it or after it.
  template <bool kFirst>
  __device__ __forceinline__ void step(int first_key, bool last) {
    auto& dp = scores;
    auto& dq = scores;
    Base::issue_scores();
    float2 lse[kScores / 4];
    constexpr bool kAhead = !Traits::kCapped;  // where there are registers for it
    if (kAhead) load_rows(lse);
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
    if (!kAhead) load_rows(lse);
    uint32_t (&p)[kSlices][4] = ds;
    make_p(p, lse, first_key);
    ptx::mbarrier_wait(barriers.ds_empty(buffer()), (index >> 1 & 1) ^ 1);
    if constexpr (Traits::kCapped) leave_factors();
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    issue_dv<0, kEarlySlices>(p);
    Base::issue_dp(dp);
    if constexpr (kEarlySlices < kSlices) issue_dv<kEarlySlices, kSlices>(p);
    read_row();
    const bool masked = Traits::kCapped || Base::is_masked(first_key);
    ptx::wgmma_wait<(kEarlySlices < kSlices) ? 1 : 0>();  // dP
    ptx::pin(dp);
    if (last) release(barriers.v_empty());
    if constexpr (Traits::kCapped) {
      ptx::pin(dv);
      take_factors();
    }
    make_ds_of<0, kEarlySlices>(dp, p, masked);
    if constexpr (kEarlySlices < kSlices) {
      ptx::wgmma_wait<0>();
      ptx::pin(dv);
      make_ds_of<kEarlySlices, kSlices>(dp, p, masked);
    }
    ptx::fence_proxy_async_shared();
    release(barriers.ds_full(buffer()));
    release(barriers.do_empty(dout_stage()));  // delta came with dO
    const int panel = first_panel(index - 1, group);
    if (!kFirst) {
      wait_for_ds_before();
      issue_dq_panel(dq, panel);
    }
    issue_dk();
    if (!kFirst) {
      ptx::wgmma_wait<1>();  // dQ
      ptx::pin(dq);
      hand_over_panel(dq);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release(barriers.q_empty(stage()));
    if (!kFirst) {
      make_dq_panels(panel + kConsumers, [] {});
      release(barriers.ds_empty((index - 1) & 1));
    }
    ++index;
    add = true;
  }

  // Does a step in which dS is zero.
  template <bool kFirst>
  __device__ __forceinline__ void skip(bool last) {
    if constexpr (!kFirst) make_dq_before([] {});
    // Phases are waited for one by one.
    ptx::mbarrier_wait(barriers.do_full(dout_stage()), dout_parity());
    if (last) release(barriers.v_empty());
    ptx::mbarrier_wait(barriers.ds_empty(buffer()), (index >> 1 & 1) ^ 1);
    Base::end_skipped();
  }

  // Waits for dS of the step before, which its dQ is made of.
  __device__ __forceinline__ void wait_for_ds_before() const {
    const uint32_t before = index - 1;
    ptx::mbarrier_wait(barriers.ds_full(before & 1), before >> 1 & 1);
  }

  // Issues a panel of dQ of the step before. Its dS is there.
  __device__ __forceinline__ void issue_dq_panel(float (&dq)[Traits::kDqRegisters],
                                                 int panel) const {
    const uint32_t place = (index - 1) & 1;
    const uint64_t ds = ptx::swizzled_descriptor(
        Base::tiles() + Traits::kDsOffset + place * Traits::kDsBytes, Traits::kKeyBoxBytes);
    const uint64_t k = ptx::swizzled_descriptor(
        Base::tiles() + Traits::kKOffset + panel * Traits::kKeyBoxBytes, Traits::kKeyBoxBytes);
    Base::multiply_dq(dq, ds, k);
  }

  // Makes this consumer's panels of dQ of the step before, from `panel` on. No other product is
  // under way.
  template <class BehindProducts>
  __device__ __forceinline__ void make_dq_panels(int panel, const BehindProducts& behind_products) {
#pragma unroll 1
    for (; panel < Traits::kPanels; panel += kConsumers) {
      auto& dq = scores;
      issue_dq_panel(dq, panel);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      if (panel + kConsumers >= Traits::kPanels) behind_products();
      hand_over_panel(dq);
    }
  }

  template <class BehindProducts>
  __device__ __forceinline__ void make_dq_before(const BehindProducts& behind_products) {
    wait_for_ds_before();
    make_dq_panels(first_panel(index - 1, group), [&] {
      release(barriers.ds_empty((index - 1) & 1));
      behind_products();
    });
  }

  // Does what is left of the last step.
  __device__ __forceinline__ void finish() {
    make_dq_before([this] { release(barriers.k_empty()); });
  }

  __device__ __forceinline__ void clear_keys() {
    clear(dk);
    clear(dv);
  }
  __device__ __forceinline__ void write_keys() {
    write_keys_by_boxes(params.dv_direct, params.withheld.dv, dv, 1.0f, params.dim_v);
    write_keys_by_boxes(params.dk_direct, params.withheld.dk, dk, params.scale, params.dim);
  }

  // Writes dK or dV by this consumer's own slot.
  template <int kRegisters>
  __device__ __forceinline__ void write_keys_by_boxes(const Direct& direct, uint2* marks,
                                                      const float (&values)[kRegisters],
                                                      float scale, int columns) {
    constexpr int kMost = Traits::kSlotBoxes * kBoxColumns / 2;  // registers
#pragma unroll
    for (int first = 0; first < kRegisters; first += kMost) {
      wait_for_own_slot();
      if (kRegisters - first >= kMost) {
        write_some_keys<kMost>(direct, marks, values, first, scale, columns);
      } else {
        write_some_keys<kRegisters % kMost>(direct, marks, values, first, scale, columns);
      }
      Base::fill_slot(group);
    }
  }
  template <int kSome, int kRegisters>
  __device__ __forceinline__ void write_some_keys(const Direct& direct, uint2* marks,
                                                  const float (&values)[kRegisters], int first,
                                                  float scale, int columns) const {
    if constexpr (kSome > 0) {
      float some[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i) some[i] = values[first + i];
      if (direct.rows == nullptr) {
        Base::store_rows(own_slot(), some, scale);
      } else {
        write_keys_directly(direct, marks, some, scale, first * 2, columns);
      }
    }
  }

  template <int kRegisters>
  __device__ __forceinline__ void write_keys_directly(const Direct& direct, uint2* marks,
                                                      const float (&values)[kRegisters],
                                                      float scale, int first_column,
                                                      int end_column) const {
    const typename Base::SharedItem& item = shared_items[items % kItemsHeld];
    Base::write_directly(direct, values, scale, item.batch, item.head_kv, first_key_of(item.tile),
                         params.seq_k, first_column, end_column,
                         Base::marks_of_keys(marks, item, group, first_column));
  }

  template <bool kFirst>
  __device__ __forceinline__ void take_step(int first_key, bool last) {
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
    read_row();
    if (Base::is_unseen(first_key)) {
      skip<kFirst>(last);
    } else {
      step<kFirst>(first_key, last);
    }
  }

  __device__ __forceinline__ void begin() { ptx::mbarrier_wait(barriers.v_full(), items & 1); }
  __device__ __forceinline__ void give_back_unused() {
    release(barriers.k_empty());
    release(barriers.v_empty());
  }
};

// Runs a consumer of any kind over its items.
template <class AnyConsumer>
__device__ __forceinline__ void take_items(AnyConsumer& consumer) {
  using Traits = typename AnyConsumer::ItsTraits;
  const Params& params = consumer.params;
  for (;;) {
    ptx::mbarrier_wait(consumer.barriers.k_full(), consumer.items & 1);
    const Item* const shared_item = consumer.shared_items + consumer.items % kItemsHeld;
    Item item;
    item.tile = __shfl_sync(kFullWarp, shared_item->tile, 0);
    item.begin = __shfl_sync(kFullWarp, shared_item->begin, 0);
    item.end = __shfl_sync(kFullWarp, shared_item->end, 0);
    if (item.tile == kNoItem) break;
    int steps = Steps(item, params.heads_per_kv).left;
    consumer.add = false;
    if (AnyConsumer::kAlwaysAdds) consumer.clear_keys();
    if (steps == 0) {
      consumer.give_back_unused();
    } else {
      const int first_key = consumer.first_key_of(item.tile);
      consumer.begin();
      consumer.template take_step<true>(first_key, steps == 1);
#pragma unroll 1
      for (; steps > 1; --steps) consumer.template take_step<false>(first_key, steps == 2);
      consumer.finish();
    }
    if (!AnyConsumer::kAlwaysAdds && !consumer.add) consumer.clear_keys();
    consumer.write_keys();
    ++consumer.items;
  }
}

}  // namespace flashmoe::sm90_backward
