// The gradient epilogue: from a consumer's products with rows of dout, da, to the gradients of g
// and u, where a = SiLU(g) u:
//
//   du = w da act(g)      dg = w da u act'(g)      a w      <da, a>      w: the weight of the pair
//
// After the steps of the products come steps of kGradientTokens tokens, through the same stages.
// TMA loads g and u. A thread reads them in the layout of its products, and overwrites them with
// the results. TMA stores these, and the stage is released a step later, after the stores have read
// it.
#pragma once

#include "cuda/moe/sm90/epilogue.cuh"
#include "cuda/moe/sm90/mainloop.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/activation.cuh"

namespace flashmoe::moe::sm90 {

template <class Traits>
struct GradientEpilogue : Epilogue<Traits> {
  using Base = Epilogue<Traits>;
  using Base::Base;
  using Base::group;
  using Base::out_rows_of;
  using Base::params;
  using Base::pipe;
  using Base::release;
  using Base::rows_before;
  using Base::send;
  using Base::shared;
  using Base::stage_before;
  using typename Base::Numeric;
  using typename Base::OutRows;

  static constexpr int kBlock = 8;  // tokens of a block; a thread has two of them
  static constexpr int kWarps = kThreadsPerGroup / kThreadsPerWarp;
  static constexpr int kTermRows = Traits::kTermRows;

  // For two tokens: computes the gradients of g and u, and a times the weight.
  static __device__ __forceinline__ void differentiate(const float* da, uint32_t& g, uint32_t& u,
                                                       uint32_t& a, const float (&weights)[2],
                                                       float (&dots)[2]) {
    const float2 gates = Numeric::unpack(g);
    const float2 ups = Numeric::unpack(u);
    const float z[2] = {gates.x, gates.y};
    const float up[2] = {ups.x, ups.y};
    float dg[2];
    float du[2];
    float activated[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sigmoid = reciprocal(1.0f + numeric::exp2_approx(-kLog2E * z[e]));
      const float act = z[e] * sigmoid;
      const float slope = fmaf(act, 1.0f - sigmoid, sigmoid);
      const float weighted = da[e] * weights[e];
      const float product = act * up[e];
      dots[e] = fmaf(da[e], product, dots[e]);
      dg[e] = weighted * up[e] * slope;
      du[e] = weighted * act;
      activated[e] = product * weights[e];
    }
    g = Numeric::pack(dg[0], dg[1]);
    u = Numeric::pack(du[0], du[1]);
    a = Numeric::pack(activated[0], activated[1]);
  }

  // In a step, for a token that does not count: zeros this warp's part of g and u, which may hold
  // anything.
  __device__ __forceinline__ void clear(uint32_t stage, uint32_t token) const {
    uint32_t row = stage + group * Traits::kOutBytes + token * kBoxRowBytes;
    asm volatile("" : "+r"(row));  // otherwise parts of the addresses stay in registers
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {  // chunks of 16 bytes, two per box
      const uint32_t chunk = (2 * warp_of_group() + i % 2) ^ (token % 8);
      ptx::store_shared(row + i / 2 * kConsumers * Traits::kOutBytes + chunk * 16,
                        make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
  }

  // For a block of tokens and this consumer's rows of both halves of the products: overwrites g and
  // u with their gradients, and stores a behind them.
  template <int kTokens>
  static __device__ __forceinline__ void differentiate_block(const Products<kTokens>& products,
                                                             int block, uint32_t box,
                                                             uint32_t slot_weights,
                                                             float (&dots)[2]) {
    const float weights[2] = {ptx::load_shared_float(slot_weights),
                              ptx::load_shared_float(slot_weights + 4)};
    if (kTokens == Traits::kTileTokens && block <= 1) {
      // While all products are live, there are few registers.
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float* const da = (half == 0 ? products.first : products.second) + 4 * block;
        const uint32_t at = box + half * kConsumers * Traits::kOutBytes;
        uint32_t g[2];
        uint32_t u[2];
        uint32_t a[2];
        ptx::ldmatrix_x2_trans(g, at);
        ptx::ldmatrix_x2_trans(u, at + Traits::kUpBoxesOffset);
        differentiate(da, g[0], u[0], a[0], weights, dots);
        differentiate(da + 2, g[1], u[1], a[1], weights, dots);
        ptx::stmatrix_x2_trans(at, g);
        ptx::stmatrix_x2_trans(at + Traits::kUpBoxesOffset, u);
        ptx::stmatrix_x2_trans(at + Traits::kActivatedOffset, a);
      }
      return;
    }
    uint32_t g[4];
    uint32_t u[4];
    uint32_t a[4];
    ptx::ldmatrix_x4_trans(g, box);
    ptx::ldmatrix_x4_trans(u, box + Traits::kUpBoxesOffset);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows i % 2 of half i / 2
      const float* const half = i / 2 == 0 ? products.first : products.second;
      differentiate(half + 4 * block + 2 * (i % 2), g[i], u[i], a[i], weights, dots);
    }
    ptx::stmatrix_x4_trans(box, g[0], g[1], g[2], g[3]);
    ptx::stmatrix_x4_trans(box + Traits::kUpBoxesOffset, u[0], u[1], u[2], u[3]);
    ptx::stmatrix_x4_trans(box + Traits::kActivatedOffset, a[0], a[1], a[2], a[3]);
  }

  // Where a lane stores its terms of a step's tokens, from this warp's place on.
  static __device__ __forceinline__ uint32_t terms_of_lane(uint32_t lane) {
    return lane / 4 % kTermRows * Traits::kTermBytes + (lane % 4 * 2 + lane / 16) * 4;
  }

  // Adds up two lanes' terms for a block's tokens, and stores the sum in shared memory.
  static __device__ __forceinline__ void store_terms(const float (&dots)[2], uint32_t to) {
    const bool second = lane_index() >= 16;
    const float given = second ? dots[0] : dots[1];
    const float kept = second ? dots[1] : dots[0];
    ptx::store_shared(to, kept + __shfl_xor_sync(kFullWarp, given, 16));
  }

  // The sum of a token's terms, in a fixed order.
  static __device__ __forceinline__ float sum_of_terms(uint32_t from) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      float terms[kTermRows];
#pragma unroll
      for (int row = 0; row < kTermRows; ++row) {
        terms[row] = ptx::load_shared_float(from + (warp * kTermRows + row) * Traits::kTermBytes);
      }
      sum += (terms[0] + terms[2]) + (terms[1] + terms[3]);
    }
    return sum;
  }

  // What the steps of a tile share, known to be uniform.
  struct Step {
    OutRows rows;
    int row_tile;
    int warp;  // of this consumer
  };

  // Sends the results of a step: one warp the gradients of g, one those of u, one a. The last warp
  // adds up the warps' terms of the tokens' dots.
  __device__ __forceinline__ void send_step(const Step& s, uint32_t stage, int first,
                                            uint32_t sums) const {
    constexpr int kSenders = kHalves + 1;
    const int lane = lane_index();
    const int warp = s.warp;
    if (warp < kSenders) {
      const bool is_a = warp == kHalves;
      if (lane == 0 && (is_a ? params.wants_a : params.wants_dz) != 0) {
        const int row = s.row_tile * Traits::kOutRows + rows_before();
        const auto& maps = is_a ? params.out : params.pre_activation[warp];
        ptx::fence_proxy_async_shared();  // once, for the stores of all threads
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int box = (warp * kHalves + half) * kConsumers + group;
          send(s.rows, maps, row + half * Traits::kHalfRows, first,
               stage + box * Traits::kOutBytes);
        }
        ptx::tma_store_commit();
      }
      __syncwarp();
    } else if (params.dots != nullptr && first + lane < s.rows.tokens) {
      const float dot = sum_of_terms(sums + 4 * lane);
      const int64_t part = s.row_tile * kConsumers + group;
      params.dots[part * params.rows + s.rows.first_slot + first + lane] = dot;
    }
  }

  // Computes a step with the products from step kStep on.
  template <int kStep, int kTokens>
  __device__ __forceinline__ void differentiate_step(const Step& s,
                                                     const Products<kTokens>& products, int step) {
    constexpr int kBlocks = kGradientTokens / kBlock;
    const auto lane = static_cast<uint32_t>(lane_index());
    const auto warp = static_cast<uint32_t>(s.warp);
    pipe.stage = uniform(pipe.stage);
    const uint32_t base = shared.weights(pipe.stage);
    const uint32_t slots =
        base + Traits::kSlotTokensOffset + static_cast<uint32_t>(s.rows.first_slot) % 4 * 4;
    const uint32_t slot_weights = slots + Traits::kSlotBytes + lane % 4 * 8;
    const uint32_t sums = base + Traits::kSumsOffset + group * Traits::kSumsBytes;
    const uint32_t terms = sums + warp * kTermRows * Traits::kTermBytes + terms_of_lane(lane);
    // Matrices of this warp's sixteen rows of either half.
    const uint32_t box = base + (lane / 16 * kConsumers + group) * Traits::kOutBytes +
                         lane % 8 * kBoxRowBytes + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
    ptx::mbarrier_wait(shared.full(pipe.stage), pipe.parity);
    if (static_cast<int>(ptx::load_shared_uint(slots + 4 * lane)) < 0) clear(base, lane);
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float dots[2] = {};
      differentiate_block(products, kStep * kBlocks + block, box + block * kBlock * kBoxRowBytes,
                          slot_weights + block * kBlock * 4, dots);
      store_terms(dots, terms + block * kBlock * 4);
    }
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
    send_step(s, base, step * kGradientTokens, sums);
    if (step > 0) {
      if (lane_index() == 0) ptx::tma_store_wait_read_but<1>();
      __syncwarp();
      release(stage_before());
    }
    pipe.advance();
  }

  // Finishes a tile's products, two steps at a time, so that the code stays in the instruction
  // cache: the products of the next steps move to the place of the last ones.
  template <int kTokens>
  __device__ __forceinline__ void finish(const Tile& tile, Products<kTokens>& products) {
    constexpr int kSteps = kTokens / kGradientTokens;
    constexpr int kMoved = kGradientTokens;  // of each half: sixteen numbers of two steps
    const Step s{out_rows_of(tile), uniform(tile.row_tile), uniform(warp_of_group())};
    int step = 0;
    if constexpr (kSteps > 1) {
#pragma unroll 1
      for (; step + 1 < kSteps; step += 2) {
        differentiate_step<0>(s, products, step);
        differentiate_step<1>(s, products, step + 1);
        if (step + 2 == kSteps) break;
#pragma unroll
        for (int i = 0; i < kTokens / 2 - kMoved; ++i) {
          products.first[i] = products.first[i + kMoved];
          products.second[i] = products.second[i + kMoved];
        }
      }
    }
    if constexpr (kSteps % 2 != 0) differentiate_step<0>(s, products, step);
  }
};

}  // namespace flashmoe::moe::sm90
