// Attention forward over a cache whose values are the first columns of its keys: multi-head latent
// attention with absorbed queries, mainly for decoding.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask),  V in K
//
// A tile is 64 packed rows of one KV head of a sequence. Blocks take equal ranges of the keys of
// all sequences (stream_k.cuh), and go from tile to tile. The keys of a block of 64 keys, 72 KiB,
// are loaded once for both products. Two such blocks and the queries fill the shared memory. One
// warpgroup loads (producer.cuh), two compute (consumer.cuh). A tile within one thread block is
// written; other tiles leave parts in the workspace, which the second kernel adds up (combine.cuh).
#pragma once

#include "cuda/attention/sm90_mla/consumer.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"

namespace flashmoe::sm90_mla {

template <class Traits>
__device__ __forceinline__ void init_barriers(typename Traits::State& state, bool query_boxes) {
  constexpr int kWarpsOfGroup = kThreadsPerGroup / kThreadsPerWarp;
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    for (auto& barrier : state.full[buffer]) ptx::mbarrier_init(shared_address(&barrier), 1);
    for (auto& barrier : state.empty[buffer]) {
      ptx::mbarrier_init(shared_address(&barrier), kWarpsOfGroup);
    }
  }
  ptx::mbarrier_init(shared_address(&state.q_full), query_boxes ? 1 : kQueryThreads);
  ptx::mbarrier_init(shared_address(&state.q_empty), kConsumers * kWarpsOfGroup);
  for (int slot = 0; slot < kSegments; ++slot) {
    ptx::mbarrier_init(shared_address(&state.segment_full[slot]), 1);
    ptx::mbarrier_init(shared_address(&state.segment_empty[slot]),
                       kConsumers * kWarpsOfGroup + (query_boxes ? 0 : kQueryWarps));
  }
  for (uint32_t& rows : state.again) rows = 0;
  ptx::fence_mbarrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    attention_forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& state = *reinterpret_cast<typename Traits::State*>(memory + Traits::kStateOffset);
  if (thread_index() == 0) {
    ptx::prefetch_tensor_map(&params.keys);
    if (params.query_heads != 0) ptx::prefetch_tensor_map(&params.queries);
    init_barriers<Traits>(state, params.query_heads != 0);
    state.range = {};
    state.longest = 0;
  }
  const BlockPlace block(params);
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  find_range(params, block, state);
  if (state.range.begin == state.range.end) return;
  const int group = warp_index() / (kThreadsPerGroup / kThreadsPerWarp);
  if (group == kConsumers) {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    Producer<Traits>{params, memory, state, block, {}}.run(warp_index() %
                                                           (kThreadsPerGroup / kThreadsPerWarp));
  } else {
    ptx::take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>{params, memory, state, group}.run();
  }
}

}  // namespace flashmoe::sm90_mla
