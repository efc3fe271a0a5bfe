// The products of a consumer warpgroup: S^T, dP^T, dV, dK and dQ.
#pragma once

#include "cuda/attention/sm90_backward/probabilities.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::sm90_backward {

template <class Traits>
struct Products : Probabilities<Traits> {
  using Base = Probabilities<Traits>;
  using Base::add;
  using Base::Base;
  using Base::dk;
  using Base::dout_stage;
  using Base::ds;
  using Base::dv;
  using Base::group;
  using Base::k_columns;
  using Base::k_rows;
  using Base::kScores;
  using Base::kSlices;
  using Base::load_delta;
  using Base::make_ds;
  using Base::scores;
  using Base::shared;
  using Base::slice_of;
  using Base::stage;
  using Base::tiles;
  using Base::v_rows;
  using typename Base::KeyMma;
  using typename Base::QueryMma;
  using typename Base::ScoreMma;
  using typename Base::ValueMma;

  // Issues S^T = K Q^T. Q is there.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t q =
        ptx::swizzled_descriptor(tiles() + Traits::kQOffset + stage() * Traits::kQBytes, 16);
    multiply_rows<Traits::kDim>(scores, k_rows(), q);
  }

  // Issues dP^T = V dO^T. dO is there.
  __device__ __forceinline__ void issue_dp(float (&dp)[kScores]) {
    const uint64_t dout =
        ptx::swizzled_descriptor(tiles() + Traits::kDoOffset + dout_stage() * Traits::kDoBytes, 16);
    multiply_rows<Traits::kDimV>(dp, v_rows(), dout);
  }

  // Issues a product over columns of this consumer's keys and queries.
  template <int kColumns>
  __device__ __forceinline__ static void multiply_rows(float (&product)[kScores], uint64_t rows,
                                                       uint64_t queries) {
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < ceil_div(kColumns, 16); ++slice) {
      ScoreMma::multiply(product, slice_of(rows, slice, Traits::kKeyBoxBytes),
                         slice_of(queries, slice, Traits::kQueryBoxBytes), slice > 0);
    }
    ptx::wgmma_commit();
  }

  // Issues dV += P^T dO and dK += dS^T Q. A product with A in registers is issued when it can run,
  // so dS of a slice is made between the products of the slices before it.
  __device__ __forceinline__ void issue_dv_and_dk(const float (&dp)[kScores],
                                                  uint32_t (&p)[kSlices][4], bool masked) {
    const uint64_t dout = ptx::swizzled_descriptor(
        shared + Traits::kDoOffset + dout_stage() * Traits::kDoBytes, Traits::kQueryBoxBytes);
    const uint64_t q = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + stage() * Traits::kQBytes, Traits::kQueryBoxBytes);
    ptx::pin(dv);
    ptx::pin(dk);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) ptx::pin(p[slice]);
    ptx::wgmma_fence();
    const uint32_t rows =
        shared + Traits::kDeltaOffset + dout_stage() * Traits::kRowBytes + lane_index() % 4 * 8;
    constexpr bool kAhead = !Traits::kCapped;  // where there are registers for it
    float2 delta[2];
    if (kAhead) load_delta(delta, rows);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (!kAhead) load_delta(delta, rows + 64 * slice);
      const float2 of_rows[2] = {delta[0], delta[1]};
      if (kAhead && slice + 1 < kSlices) load_delta(delta, rows + 64 * (slice + 1));
      ValueMma::multiply_values(dv, p[slice], ptx::advance(dout, slice * 2048), slice > 0 || add);
      make_ds(slice, dp, p[slice], of_rows, masked);
      ptx::pin(ds[slice]);
      ptx::wgmma_fence();
      KeyMma::multiply_values(dk, ds[slice], ptx::advance(q, slice * 2048), slice > 0 || add);
    }
    ptx::wgmma_commit();
  }

  // Issues dQ = dS K over all keys, for this consumer's rows or columns.
  __device__ __forceinline__ void issue_dq(float (&dq)[Traits::kDqRegisters],
                                           uint32_t place) const {
    const uint64_t k = k_columns();
    const uint64_t ds =
        ptx::swizzled_descriptor(shared + Traits::kDsOffset + place * Traits::kDsBytes +
                                     (Traits::kSplitsColumns ? 0 : group * Traits::kKeyBoxBytes),
                                 Traits::kKeyBoxBytes);
    multiply_dq(dq, ds, k);
  }
  static __device__ __forceinline__ void multiply_dq(float (&dq)[Traits::kDqRegisters], uint64_t ds,
                                                     uint64_t k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kTileK / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, slice * 2048), ptx::advance(k, slice * 2048),
                                slice > 0);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace flashmoe::sm90_backward
