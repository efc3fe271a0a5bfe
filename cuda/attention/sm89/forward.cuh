// The attention kernel of sm_89 (Ada) and newer. Its two schemes differ in what a warp owns
// (split_q.cuh and split_dim_v.cuh). Both use an online softmax with a lazy row max.
#pragma once

#include "cuda/attention/sm89/split_dim_v.cuh"
#include "cuda/attention/sm89/split_q.cuh"
#include "cuda/ptx/pdl.cuh"

namespace flashmoe::sm89 {

template <class Traits>
__device__ __forceinline__ void compute_tile(const ParamsOf<Traits>& params,
                                             unsigned char* shared) {
  if constexpr (Traits::kScheme == Scheme::kSplitQ) {
    split_q::compute_tile<Traits>(params, shared);
  } else {
    split_dim_v::compute_tile<Traits>(params, shared);
  }
}

// Computes the tile of a slot, if any; more than one if offsets are inconsistent.
template <class Traits>
__device__ __forceinline__ void compute_slot(const ParamsOf<Traits>& params,
                                             unsigned char* shared) {
  int after = -1;
  while (find_tile<Traits>(params, after, shared)) {
    compute_tile<Traits>(params, shared);
    const RaggedTile& tile = RaggedTile::in<Traits>(shared);
    if (tile.more_owners == 0) return;
    after = tile.first_owner;
    __syncthreads();
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    attention_forward_kernel(const __grid_constant__ ParamsOf<Traits> params) {
  extern __shared__ __align__(1024) unsigned char shared[];
#if __CUDA_ARCH__ >= 900  // the host launches faster with the programmatic attribute
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  if constexpr (Traits::kRagged) {
    compute_slot<Traits>(params, shared);
  } else {
    compute_tile<Traits>(params, shared);
  }
}

}  // namespace flashmoe::sm89
