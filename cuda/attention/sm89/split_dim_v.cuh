// Attention forward for head dimensions above 128, with mma.sync: a warp owns rows of the scores
// and columns of the output.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// One block computes kTileQ = 16 * kWarps query rows of one head. At these dimensions a warp has
// registers for only 16 rows of output. A fragment of V from shared memory would then feed only two
// products, and shared memory, not the tensor cores, would be the bottleneck. So a warp computes
// the scores and probabilities of its 16 rows, stores the probabilities in shared memory, and
// multiplies those of all rows by its 1 / kWarps of V's columns: a fragment of V feeds kTileQ / 8
// products. Per step of 64 keys at dimension 256 a warp reads 64 fragments of K, 16 of P and 16 of
// V, instead of 64 of K and 64 of V.
//
// A step: Q K^T while V arrives; softmax; barrier, with a vote on whether any row_max changed; P V
// while the next K arrives. Part of Q lies in the area of P and moves to registers first.
//
// Dimensions are padded to the compiled ones: zeros on load, never stored.
#pragma once

#include "cuda/attention/sm89/common.cuh"
#include "cuda/attention/sm89/pairs.cuh"

namespace flashmoe::sm89::split_dim_v {

// A warp owns every kWarps-th group of 16 columns, so that under the swizzle its fragments of V are
// a constant apart. Element [a][n][e]: row 16a + lane / 4 + 8 (e / 2) of the tile, column 16 (warp
// + kWarps (n / 2)) + 8 (n % 2) + 2 (lane % 4) + e % 2.
template <class Traits>
using Accumulators = float[Traits::kTileQ / 16][Traits::kColumnsPerWarp / 8][4];

template <class Traits>
__device__ __forceinline__ void rescale(Accumulators<Traits>& out, const float* factors) {
  const int row = lane_index() / 4;
#pragma unroll
  for (int a = 0; a < Traits::kTileQ / 16; ++a) {
    const float factor[2] = {factors[16 * a + row], factors[16 * a + row + 8]};
#pragma unroll
    for (int n = 0; n < Traits::kColumnsPerWarp / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[a][n][e] *= factor[e / 2];
    }
  }
}

// Stores the row factors of this warp's rows for all warps.
template <class Traits>
__device__ __forceinline__ void publish(float* factors, const float (&factor)[2]) {
  const int lane = lane_index();
  const int row = warp_index() * Traits::kRowsPerWarp + lane / 4;
  if (lane % 4 == 0) {
    factors[row] = factor[0];
    factors[row + 8] = factor[1];
  }
}

// Writes P = 2^(scores * scale_log2 - row_max) of this warp's rows to shared memory.
template <class Traits>
__device__ __forceinline__ void write_probabilities(unsigned char* p_tile,
                                                    Statistics<Traits>& statistics,
                                                    const Scores<Traits>& scores,
                                                    float scale_log2) {
  using Layout = typename Traits::PLayout;
  const int lane = lane_index();
  const int row = warp_index() * Traits::kRowsPerWarp + lane / 4;
#pragma unroll
  for (int n = 0; n < Traits::kStepKeys / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint32_t*>(p_tile + Layout::chunk_offset(row + 8 * half, n) +
                                   4 * (lane % 4)) =
          statistics.exponentiate(scores[0][n], scale_log2, 0, half);
    }
  }
}

// out += P V of one step, for the warp's columns.
template <class Traits>
__device__ __forceinline__ void multiply_values(Accumulators<Traits>& out, uint32_t p_lane,
                                                uint32_t v_lane) {
  constexpr int kAtoms = Traits::kTileQ / 16;
  constexpr int kSlices = Traits::kStepKeys / 16;
  constexpr int kColumns = Traits::kColumnsPerWarp / 16;
  constexpr int kFragments = kSlices * kColumns;
  constexpr int kBuffers = Traits::kAheadFragments + 1;
  uint32_t v[kBuffers][4];
  uint32_t p[2][kAtoms][4];  // of 16 keys, and of the next 16
  const auto load_v = [&](int i) {
    ptx::ldmatrix_x4_trans(
        v[i % kBuffers],
        Traits::VLayout::fragment(v_lane, 16 * (i / kColumns), i % kColumns * Traits::kWarps));
  };
  const auto load_p = [&](int slice, int a) {
    ptx::ldmatrix_x4(p[slice % 2][a], Traits::PLayout::fragment(p_lane, 16 * a, slice));
  };
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) load_p(0, a);
#pragma unroll
  for (int i = 0; i < kBuffers - 1 && i < kFragments; ++i) load_v(i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int slice = i / kColumns;
    const int n = i % kColumns;
    if (i + kBuffers - 1 < kFragments) load_v(i + kBuffers - 1);
    if (n == kColumns - 1 && slice + 1 < kSlices) {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) load_p(slice + 1, a);
    }
    const uint32_t (&v_now)[4] = v[i % kBuffers];
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      ptx::mma_m16n8k16<typename Traits::Element>(out[a][2 * n], p[slice % 2][a], v_now[0],
                                                  v_now[1]);
      ptx::mma_m16n8k16<typename Traits::Element>(out[a][2 * n + 1], p[slice % 2][a], v_now[2],
                                                  v_now[3]);
    }
  }
}

// Multiplies by the row factors from shared memory and writes out.
template <class Traits>
__device__ __forceinline__ void store_results(const Accumulators<Traits>& out, const float* factors,
                                              const ParamsOf<Traits>& params,
                                              unsigned char* shared) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  using Layout = typename Traits::OLayout;
  const int lane = lane_index();
  const int warp = warp_index();
  uint32_t largest = 0;
  bool fallback = false;
#pragma unroll
  for (int a = 0; a < Traits::kTileQ / 16; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * a + lane / 4 + 8 * half;
      const float factor = factors[row];
      fallback = fallback || factor == kNeedsFallback;
#pragma unroll
      for (int n = 0; n < Traits::kColumnsPerWarp / 8; ++n) {
        const int chunk = 2 * (warp + Traits::kWarps * (n / 2)) + n % 2;
        const uint32_t pair =
            Numeric::pack(out[a][n][2 * half] * factor, out[a][n][2 * half + 1] * factor);
        *reinterpret_cast<uint32_t*>(shared + Layout::chunk_offset(row, chunk) + 4 * (lane % 4)) =
            pair;
        largest = numeric::max_magnitude<typename Traits::Element>(largest, pair);
      }
    }
  }
  const TileIn<Traits> tile = tile_in<Traits>(shared);
  const bool nonfinite = numeric::any_nonfinite<typename Traits::Element>(largest);
  fallback = fallback || (is_masked(params, tile) && nonfinite);
  if (__syncthreads_or(fallback)) {
    masked_rows_fallback<Traits>(params, tile, tile.first_row + warp, Traits::kWarps,
                                 tile.first_row + Traits::kTileQ);
  } else {
    store_rows<Layout, Traits::kTileQ, Traits::kThreads>(shared, params, tile, tile.first_row,
                                                         thread_index());
  }
}

template <class Traits>
__device__ __forceinline__ void compute_tile(const ParamsOf<Traits>& params,
                                             unsigned char* shared) {
  constexpr int kStep = Traits::kStepKeys;
  const TileIn<Traits> tile = begin_tile<Traits>(params, shared);
  const int warp = warp_index();
  const uint32_t shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  float* factors = reinterpret_cast<float*>(shared + Traits::kFactorsOffset);  // [kTileQ]

  const uint16_t* k = params.tensors.k + tile.batch * params.tensors.k_strides.batch +
                      tile.head_kv * params.tensors.k_strides.head;
  const uint16_t* v = params.tensors.v + tile.batch * params.tensors.v_strides.batch +
                      tile.head_kv * params.tensors.v_strides.head;

  const TileSteps<Traits> steps(params.score, sequence_of(params, tile), tile.first_row);
  const int first_key = sequence_of(params, tile).begin_k + steps.first;
  // Keys of the sequence from `key` on. The length is read again: kept across the main loop it
  // would take registers.
  const auto keys_from = [&](int key) { return sequence_of(params, tile).length_k - key; };

  KLoader<Traits> k_loader(k + first_key * params.tensors.k_strides.seq,
                           params.tensors.k_strides.seq, shared_address + Traits::kKOffset);
  VLoader<Traits> v_loader =
      make_v_loader<Traits>(v + first_key * params.tensors.v_strides.seq, params, k_loader,
                            shared_address + Traits::kKOffset, shared_address + Traits::kVOffset);
  uint32_t q_lane = a_fragments<typename Traits::QSharedLayout>(
      shared_address + Traits::kQSharedOffset, warp * Traits::kRowsPerWarp);
  uint32_t k_lane = b_fragments<typename Traits::KLayout>(shared_address + Traits::kKOffset);
  uint32_t p_lane = a_fragments<typename Traits::PLayout>(shared_address + Traits::kPOffset, 0);
  uint32_t v_lane = Traits::VLayout::fragment_base(
      shared_address + Traits::kVOffset, lane_index() & 15, 2 * warp + (lane_index() >> 4));
  if constexpr (Traits::kQSharedDims > 0) pin(q_lane);
  pin(k_lane);
  pin(p_lane);
  pin(v_lane);

  copy_q<Traits>(params, tile, shared_address);
  ptx::cp_async_commit();
  const int keys_left = keys_from(steps.first);
  if (steps.count > 0) load_k<Traits>(k_loader, params, shared, 0, keys_left);
  ptx::cp_async_commit();
  if (steps.count > 0) load_v<Traits>(v_loader, params, shared, 0, keys_left);
  ptx::cp_async_commit();
  ptx::cp_async_wait<2>();
  __syncthreads();
  const uint32_t q_register_lane = a_fragments<typename Traits::QRegisterLayout>(
      shared_address + Traits::kQRegisterOffset, warp * Traits::kRowsPerWarp);
  Queries<Traits> q_registers;
#pragma unroll
  for (int pair = 0; pair < Traits::kQRegisterDims / 16; ++pair) {
    load_q<typename Traits::QRegisterLayout>(q_registers[pair], q_register_lane, pair);
  }

  Statistics<Traits> statistics;
  statistics.reset();
  Accumulators<Traits> accumulators;
#pragma unroll
  for (int a = 0; a < Traits::kTileQ / 16; ++a) {
#pragma unroll
    for (int n = 0; n < Traits::kColumnsPerWarp / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulators[a][n][e] = 0.0f;
    }
  }

  ptx::cp_async_wait<1>();
  __syncthreads();  // Q has been read; K has arrived
  for (int step = 0; step < steps.count; ++step) {
    Scores<Traits> scores;
    if constexpr (Traits::kBiased) {
      StepPairs<Traits>(params, steps, shared, step).copy();
      StepPairs<Traits>(params, steps, shared, step).load();
      ptx::cp_async_commit();
    }
    multiply_scores<Traits>(scores, q_registers, q_lane, k_lane);
    if (params.score.capped()) params.score.cap(scores);
    if constexpr (Traits::kBiased) {
      ptx::cp_async_wait<0>();
      if (!StepPairs<Traits>(params, steps, shared, step).apply(scores, statistics.seen)) {
        // Rows of other warps see keys of this step, and all warps take part in its products.
#pragma unroll
        for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[0][n][e] = -INFINITY;
        }
      }
      __syncwarp();  // P overwrites the numbers of pairs
    } else {
      mask_step<Traits>(scores, params, steps, shared, step);
    }
    float factor[2] = {1.0f, 1.0f};
    const bool rescaled = statistics.rescale(scores, params.score.scale_log2,
                                             [&](int, int half, float by) { factor[half] = by; });
    publish<Traits>(factors, factor);
    write_probabilities<Traits>(shared + Traits::kPOffset, statistics, scores,
                                params.score.scale_log2);
    ptx::cp_async_wait<0>();
    const bool any_rescaled = __syncthreads_or(rescaled) != 0;  // V, P are ready; K has been read
    const int keys = keys_from(steps.first) - (step + 1) * kStep;
    if (step + 1 < steps.count) load_k<Traits>(k_loader, params, shared, 0, keys);
    ptx::cp_async_commit();
    if (any_rescaled && step > 0) rescale<Traits>(accumulators, factors);
    multiply_values<Traits>(accumulators, p_lane, v_lane);
    ptx::cp_async_wait<0>();
    __syncthreads();  // K has arrived; V, P and the factors have been read
    if (step + 1 < steps.count) load_v<Traits>(v_loader, params, shared, 0, keys);
    ptx::cp_async_commit();
  }

  const TileIn<Traits> kept = tile_in<Traits>(shared);
  const int row = kept.first_row + warp_index() * Traits::kRowsPerWarp + lane_index() / 4;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factor[half] = statistics.finish(params, kept, row + 8 * half, 0, half);
  }
  publish<Traits>(factors, factor);
  __syncthreads();
  store_results<Traits>(accumulators, factors, params, shared);
}

}  // namespace flashmoe::sm89::split_dim_v
