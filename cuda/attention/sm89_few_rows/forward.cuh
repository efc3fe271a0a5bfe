// Attention forward for few query rows, or small problems: many blocks share one pass over memory.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// A tile is kRows packed query rows of one KV head. Several blocks share it, each with 1 to 8
// warps. All warps of these blocks take steps of kStepKeys keys in turn, each with its own online
// softmax (few_rows/products.cuh). K and V go from global memory directly to registers: the loads
// of a step, 8 to 16 KiB per warp, are in flight while the previous step is computed. At the end
// the parts are added up (combine.cuh), first those of a block through shared memory, then those of
// a tile's blocks. Blocks of a cluster, up to 16, exchange parts through each other's shared
// memory, and each writes a share of the tile. With more blocks, or without clusters, a second
// kernel adds up parts from the workspace. No atomics.
//
// Clusters need sm_90 code.
#pragma once

#include "cuda/attention/sm89_few_rows/combine.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::sm89_few_rows {

// Stores the visible keys of each row.
template <class Traits>
__device__ __forceinline__ void note_rows(const Params& params, const Tile& tile,
                                          const Shared<Traits>& shared) {
  const int row = thread_index();
  if (row >= Traits::kRows) return;
  shared.keys()[row] =
      sequence_of(params, tile.batch).keys(params.score, Row::of(params, tile, row).query);
}

// Loads Q to registers, or to shared memory, each warp a part.
template <class Traits>
__device__ __forceinline__ void load_q(QFragments<Traits>& q, const Params& params,
                                       const Tile& tile, const Shared<Traits>& shared) {
  if constexpr (Traits::kQueriesInRegisters) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) load_q_block<Traits>(q[n], params, tile, n);
  } else {
    for (int n = warp_index(); n < Traits::kRowBlocks; n += warp_count()) {
      load_q_block<Traits>(q[0], params, tile, n);
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        shared.queries()[(n * Traits::kKChunks + c) * kThreadsPerWarp + lane_index()] =
            make_uint4(q[0][c][0], q[0][c][1], q[0][c][2], q[0][c][3]);
      }
    }
  }
}

// Computes this warp's part of the tile and leaves it in shared memory.
template <class Traits>
__device__ __forceinline__ void compute_part(const Params& params, const Tile& tile,
                                             const Shared<Traits>& shared) {
  const int lane = lane_index();
  const int warp = warp_index();
  const int part = tile.rank * warp_count() + warp;
  const int jump =
      warp_count() * params.blocks_per_tile.number() * Traits::kStepKeys;  // to the next step
  int key = tile.some.first + part * Traits::kStepKeys;
  const int end = tile.some.end;
  const uint16_t* k =
      tile.k(params) + (key + lane / 4) * params.tensors.k_strides.seq + 8 * (lane % 4);
  const uint16_t* v =
      tile.v(params) + (key + 2 * (lane % 4)) * params.tensors.v_strides.seq + 8 * (lane / 4);

  KFragments<Traits> k_now;
  VFragments<Traits> v_now;
  QFragments<Traits> q;
  if (key < end) {
    load_k<Traits>(k_now, k, params.tensors.k_strides.seq, end - key, params.tensors.dim);
    load_v<Traits>(v_now, v, params.tensors.v_strides.seq, end - key, params.tensors.dim_v);
  }
  load_q<Traits>(q, params, tile, shared);
  if (params.score.masked) note_rows(params, tile, shared);
  if (!Traits::kQueriesInRegisters || params.score.masked) __syncthreads();

  Statistics<Traits> statistics;
  statistics.reset();
  Accumulators<Traits> out;
#pragma unroll
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < Traits::kDimV / 16; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][j][e] = 0.0f;
    }
  }
  while (key < end) {
    const int next = key + jump;
    Scores<Traits> scores;
    multiply_k<Traits>(scores, k_now, q, shared);
    k += jump * params.tensors.k_strides.seq;
    if (next < end)
      load_k<Traits>(k_now, k, params.tensors.k_strides.seq, end - next, params.tensors.dim);
    if (params.score.capped()) params.score.cap(scores);
    if (key < tile.all.first || key + Traits::kStepKeys > tile.all.end) {
      mask_step<Traits>(scores, params, tile, shared, key);
    }
    statistics.rescale(scores, params.score.scale_log2, out);
    Probabilities<Traits> p;
    statistics.exponentiate(p, scores, params.score.scale_log2);
    multiply_v<Traits>(out, v_now, p);
    v += jump * params.tensors.v_strides.seq;
    if (next < end)
      load_v<Traits>(v_now, v, params.tensors.v_strides.seq, end - next, params.tensors.dim_v);
    key = next;
  }
  store_part<Traits>(out, statistics, shared, warp, unit_of);
}

template <class Traits>
__global__ void __launch_bounds__(kMaxWarps* kThreadsPerWarp, 1)
    attention_forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Shared<Traits> shared = {memory};
  const Tile tile = Tile::of_block<Traits>(params);
#if __CUDA_ARCH__ >= 900
  if (params.cluster_log2 > 0) begin_exchange<Traits>(params, tile, shared);
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  compute_part<Traits>(params, tile, shared);
  __syncthreads();
  if (params.parts == nullptr) {
    write_tile<Traits>(params, tile, shared);
  } else {
    leave_part<Traits>(params, tile, shared);
  }
}

}  // namespace flashmoe::sm89_few_rows
