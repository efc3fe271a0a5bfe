// Attention forward for head dimensions up to 128, with mma.sync: every warp owns rows.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// One block computes kTileQ query rows of one head. A warp owns 16 * kRowAtoms of them from scores
// to output, so scores, probabilities and accumulators stay in its registers. All warps walk the
// keys together, kStepKeys at a time, from the first to the last one visible to the tile. cp.async
// brings K and V into a ring of kStages steps, with one block barrier per step. The exponentials of
// the next 16 keys are computed between the products of the current ones.
//
// Dimensions are padded to the compiled ones: zeros on load, never stored.
#pragma once

#include "cuda/attention/sm89/common.cuh"
#include "cuda/attention/sm89/pairs.cuh"

namespace flashmoe::sm89::split_q {

template <class Traits>
using Accumulators = float[Traits::kRowAtoms][Traits::kDimV / 8][4];

// Byte offset of the stage of a step.
template <class Traits>
__device__ __forceinline__ uint32_t stage_of(int step) {
  return static_cast<uint32_t>(step) % Traits::kStages * Traits::kStageBytes;
}

// Whether this warp's rows see no key of a step, nor any before it. It is computed only if a row is
// masked: kept across the main loop it would take registers.
template <class Traits>
__device__ __forceinline__ bool lies_left(const ParamsOf<Traits>& params,
                                          const TileSteps<Traits>& block,
                                          const unsigned char* shared, int step) {
  if (step >= block.left_steps) return false;
  const TileIn<Traits> tile = tile_in<Traits>(shared);
  const int row = tile.first_row + warp_index() * Traits::kRowsPerWarp;
  return block.first + (step + 1) * Traits::kStepKeys <=
         sequence_of(params, tile).first_key(params.score, query_of(params, row));
}

// out += P V of one step, with P = 2^(scores * scale_log2 - row_max).
template <class Traits>
__device__ __forceinline__ void multiply_values(Accumulators<Traits>& out,
                                                Statistics<Traits>& statistics,
                                                const Scores<Traits>& scores, uint32_t v_lane,
                                                float scale_log2) {
  constexpr int kSlices = Traits::kStepKeys / 16;
  constexpr int kColumns = Traits::kDimV / 16;
  constexpr int kFragments = kSlices * kColumns;
  constexpr int kBuffers = Traits::kAheadFragments + 1;
  constexpr int kRegisters = 4 * Traits::kRowAtoms;
  constexpr int kPerColumn = (kRegisters + kColumns - 1) / kColumns;
  uint32_t v[kBuffers][4];
  uint32_t p[2][Traits::kRowAtoms][4];  // A fragments of 16 keys, and of the next 16
  const auto load = [&](int i) {
    ptx::ldmatrix_x4_trans(v[i % kBuffers],
                           Traits::VLayout::fragment(v_lane, 16 * (i / kColumns), i % kColumns));
  };
  // Register r % 4 of atom r / 4 holds row half r % 2 of score tile 2 * slice + r % 4 / 2.
  const auto exponentiate = [&](int slice, int r) {
    const int a = r / 4;
    p[slice % 2][a][r % 4] =
        statistics.exponentiate(scores[a][2 * slice + r % 4 / 2], scale_log2, a, r % 2);
  };
#pragma unroll
  for (int i = 0; i < kBuffers - 1 && i < kFragments; ++i) load(i);
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) exponentiate(0, r);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int slice = i / kColumns;
    const int n = i % kColumns;
    if (i + kBuffers - 1 < kFragments) load(i + kBuffers - 1);
    const uint32_t (&v_now)[4] = v[i % kBuffers];
#pragma unroll
    for (int a = 0; a < Traits::kRowAtoms; ++a) {
      ptx::mma_m16n8k16<typename Traits::Element>(out[a][2 * n], p[slice % 2][a], v_now[0],
                                                  v_now[1]);
      ptx::mma_m16n8k16<typename Traits::Element>(out[a][2 * n + 1], p[slice % 2][a], v_now[2],
                                                  v_now[3]);
    }
    if (slice + 1 < kSlices) {
#pragma unroll
      for (int r = n * kPerColumn; r < (n + 1) * kPerColumn && r < kRegisters; ++r) {
        exponentiate(slice + 1, r);
      }
    }
  }
}

// Divides by the sums and writes out, through shared memory, and lse.
template <class Traits>
__device__ __forceinline__ void store_results(const Accumulators<Traits>& out,
                                              Statistics<Traits>& statistics,
                                              const ParamsOf<Traits>& params,
                                              unsigned char* shared) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  using Layout = typename Traits::OLayout;
  const TileIn<Traits> tile = tile_in<Traits>(shared);
  const int lane = lane_index();
  const int warp_row = warp_index() * Traits::kRowsPerWarp;
  unsigned char* warp_tile = shared + warp_row * Layout::kRowBytes;
  uint32_t largest = 0;
  bool fallback = false;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * a + lane / 4 + 8 * half;
      const float factor =
          statistics.finish(params, tile, tile.first_row + warp_row + row, a, half);
      fallback = fallback || factor == kNeedsFallback;
#pragma unroll
      for (int n = 0; n < Traits::kDimV / 8; ++n) {
        const uint32_t pair =
            Numeric::pack(out[a][n][2 * half] * factor, out[a][n][2 * half + 1] * factor);
        *reinterpret_cast<uint32_t*>(warp_tile + Layout::chunk_offset(row, n) + 4 * (lane % 4)) =
            pair;
        largest = numeric::max_magnitude<typename Traits::Element>(largest, pair);
      }
    }
  }
  __syncwarp();
  const int first_row = tile.first_row + warp_row;
  const bool nonfinite = numeric::any_nonfinite<typename Traits::Element>(largest);
  fallback = fallback || (is_masked(params, tile) && nonfinite);
  if (__any_sync(kFullWarp, fallback)) {
    masked_rows_fallback<Traits>(params, tile, first_row, 1, first_row + Traits::kRowsPerWarp);
  } else {
    store_rows<Layout, Traits::kRowsPerWarp, kThreadsPerWarp>(warp_tile, params, tile, first_row,
                                                              lane);
  }
}

template <class Traits>
__device__ __forceinline__ void compute_tile(const ParamsOf<Traits>& params,
                                             unsigned char* shared) {
  constexpr int kStages = Traits::kStages;
  constexpr int kStep = Traits::kStepKeys;
  const TileIn<Traits> tile = begin_tile<Traits>(params, shared);
  const SequenceIn<Traits> sequence = sequence_of(params, tile);
  const int warp = warp_index();
  const uint32_t shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  const uint16_t* k = params.tensors.k + tile.batch * params.tensors.k_strides.batch +
                      tile.head_kv * params.tensors.k_strides.head;
  const uint16_t* v = params.tensors.v + tile.batch * params.tensors.v_strides.batch +
                      tile.head_kv * params.tensors.v_strides.head;

  // Steps that the block loads. This warp computes those before `steps` that it needs.
  const TileSteps<Traits> block(params.score, sequence, tile.first_row);
  const int warp_row = tile.first_row + warp * Traits::kRowsPerWarp;
  const int last_row = min(warp_row + Traits::kRowsPerWarp, rows_of(tile, sequence)) - 1;
  const int last_query = query_of(params, last_row);
  const int steps =
      warp_row <= last_row
          ? (sequence.end_key(params.score, last_query) - block.first + kStep - 1) / kStep
          : 0;

  const int first_key = sequence.begin_k + block.first;
  KLoader<Traits> k_loader(k + first_key * params.tensors.k_strides.seq,
                           params.tensors.k_strides.seq, shared_address);
  VLoader<Traits> v_loader =
      make_v_loader<Traits>(v + first_key * params.tensors.v_strides.seq, params, k_loader,
                            shared_address, shared_address + Traits::kKBytes);
  // One group per step, including empty ones, so that waits by count stay correct.
  const auto load_step = [&](int step) {
    const uint32_t stage = stage_of<Traits>(step);
    if (step < block.count) {
      const int keys = sequence.length_k - block.first - step * kStep;
      load_k<Traits>(k_loader, params, shared, stage, keys);
      load_v<Traits>(v_loader, params, shared, stage, keys);
    }
    ptx::cp_async_commit();
  };

  uint32_t q_lane = a_fragments<typename Traits::QSharedLayout>(
      shared_address + Traits::kQSharedOffset, warp * Traits::kRowsPerWarp);
  uint32_t k_lane = b_fragments<typename Traits::KLayout>(shared_address);
  uint32_t v_lane = b_fragments_trans<typename Traits::VLayout>(shared_address + Traits::kKBytes);
  if constexpr (Traits::kQSharedDims > 0) pin(q_lane);
  pin(k_lane);
  pin(v_lane);

  copy_q<Traits>(params, tile, shared_address);
  ptx::cp_async_commit();
#pragma unroll
  for (int step = 0; step < Traits::kEarlySteps; ++step) {
    load_step(step);
  }
  Queries<Traits> q_registers;
  if constexpr (Traits::kQRegisterDims > 0) {
    ptx::cp_async_wait<Traits::kEarlySteps>();
    __syncthreads();
    const uint32_t q_register_lane = a_fragments<typename Traits::QRegisterLayout>(
        shared_address + Traits::kQRegisterOffset, warp * Traits::kRowsPerWarp);
#pragma unroll
    for (int pair = 0; pair < Traits::kQRegisterDims / 16; ++pair) {
      load_q<typename Traits::QRegisterLayout>(q_registers[pair], q_register_lane, pair);
    }
    if constexpr (Traits::kEarlySteps < kStages - 1) __syncthreads();  // K and V overwrite Q
  }
#pragma unroll
  for (int step = Traits::kEarlySteps; step < kStages - 1; ++step) {
    load_step(step);
  }

  Statistics<Traits> statistics;
  statistics.reset();
  Accumulators<Traits> accumulators;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < Traits::kDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulators[a][n][e] = 0.0f;
    }
  }

  const auto add_values = [&](const Scores<Traits>& scores, uint32_t stage) {
    statistics.rescale(scores, params.score.scale_log2, [&](int a, int half, float factor) {
#pragma unroll
      for (int n = 0; n < Traits::kDimV / 8; ++n) {
        accumulators[a][n][2 * half] *= factor;
        accumulators[a][n][2 * half + 1] *= factor;
      }
    });
    multiply_values<Traits>(accumulators, statistics, scores, v_lane + stage,
                            params.score.scale_log2);
  };

  if constexpr (Traits::kBiased) {
    // The tile is in shared memory, where the pairs look for it. If Q is in registers, a barrier
    // has been passed since it was stored.
    if constexpr (Traits::kQRegisterDims == 0) __syncthreads();
    // Copies pairs of the first step that this warp computes. Those of each next step are copied
    // when their area is free, and loaded when registers are: one group per step.
    const int first =
        (sequence.first_key(params.score, query_of(params, warp_row)) - block.first) / kStep;
    if (first < steps) {
      StepPairs<Traits>(params, block, shared, first).copy();
      StepPairs<Traits>(params, block, shared, first).load();
    }
    ptx::cp_async_commit();
  }
  for (int step = 0; step < block.count; ++step) {
    const uint32_t stage = stage_of<Traits>(step);
    ptx::cp_async_wait<kStages - 2 + (Traits::kBiased ? 1 : 0)>();
    __syncthreads();  // this step has arrived; the one before has been read
    load_step(step + kStages - 1);
    if (step < steps && !lies_left<Traits>(params, block, shared, step)) {
      Scores<Traits> scores;
      multiply_scores<Traits>(scores, q_registers, q_lane, k_lane + stage);
      if (params.score.capped()) params.score.cap(scores);
      if constexpr (Traits::kBiased) {
        ptx::cp_async_wait<1>();  // the pairs have arrived
        const bool sees =
            StepPairs<Traits>(params, block, shared, step).apply(scores, statistics.seen);
        const StepPairs<Traits> next(params, block, shared, step + 1);
        if (step + 1 < steps) next.copy();
        ptx::cp_async_commit();
        if (sees) add_values(scores, stage);
        if (step + 1 < steps) next.load();
      } else {
        mask_step<Traits>(scores, params, block, shared, step);
        add_values(scores, stage);
      }
    } else if constexpr (Traits::kBiased) {
      ptx::cp_async_commit();
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // the output overwrites the stages
  store_results<Traits>(accumulators, statistics, params, shared);
}

}  // namespace flashmoe::sm89::split_q
