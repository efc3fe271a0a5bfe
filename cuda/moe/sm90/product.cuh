// Grouped GEMM on sm_90, warp-specialised and persistent.
//
//   up     a[s] = act(w_gate[e] x[t]) * (w_up[e] x[t])     slot s of expert e, of token t
//   down   y[s] = w_down[e] a[s] + bias[e]
//
// Weights are the M side of wgmma and tokens the N side, up to 192 of an expert, in steps of 64
// columns. So the width of a tile, which is chosen on the device for each expert, may be any
// multiple of 8, and a thread holds gate and up of the same element. A consumer warpgroup has 128
// rows of weights, 64 of either half, and all tokens of a tile: up to 192 accumulators a thread. In
// `up` its two consumers share a tile of 256 rows (128 of the gate and the same 128 of up); in
// `down` each has a tile of its own and they alternate, so that one's products are computed while
// the other writes out what it has.
//
// The first warpgroup loads: one warp issues the copies of weights (and in `down` of tokens) by
// TMA, three gather the rows of tokens by cp.async. Both end at the stage's mbarrier.
//
// Weights whose rows of gate and up are interleaved come in boxes of 64 rows, 32 of either, of
// which neighbouring ones are each other's other half: a thread has gates of one and a thread four
// lanes on the ups of the same rows, and they exchange what the other needs when products are over
// (take_apart).
//
// Blocks come in clusters of two, which take the same steps. In `up` the two have neighbouring
// token tiles of the same weights, and each loads one half of these for both; or, of the last of an
// odd number of token tiles, and in `down` always, neighbouring weight rows of the same tokens, of
// which in `down` each loads one half for both.
//
// Where rows of `down` are short a tile's output takes longer to leave than its products to be
// computed. There (Use::kShortDown) a consumer keeps the weights of 64 rows in registers while a
// run of token tiles of the expert passes by, of which both consumers multiply each by turns, and
// two warps of the first warpgroup send what these leave in shared memory.
//
// A layer's `down` begins while `up` still runs: its blocks come to multiprocessors as those of
// `up` leave them, wait for the tokens of an expert at a time (Progress), and take items one by one
// (Deal).
//
// The parts: scheduler.cuh says which tile comes next, progress.cuh how far `up` is; producer.cuh
// and gather.cuh load, mainloop.cuh multiplies, epilogue.cuh stores, and consumer.cuh puts these
// two together.
#pragma once

#include "cuda/moe/sm90/consumer.cuh"
#include "cuda/moe/sm90/gather.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/producer.cuh"
#include "cuda/moe/sm90/progress.cuh"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::moe::sm90 {

template <class Traits>
__device__ __forceinline__ void consume(const Params& params, const Shared<Traits>& shared,
                                        int group) {
  ptx::take_registers<Traits::kConsumerRegisters>();
  if (Traits::kGathers) {
    // No thread but this one lets `down` begin. The second consumer announces nothing before it has
    // waited for the first one (kLagBarrier), and so for this.
    if (threadIdx.x == kThreadsPerGroup) {
      if (Traits::kAnnounces) begin_progress(params);
      ptx::launch_dependents();
    }
    __syncwarp();
  } else if (params.progress == nullptr) {
    ptx::wait_for_dependencies();
  }
  Consumer<Traits> consumer(params, shared, group);
  if constexpr (Traits::kKeeps) {
    consumer.run_kept();
  } else {
    consumer.run();
  }
}

template <class Traits>
__device__ __forceinline__ void load(const Params& params, const Shared<Traits>& shared, int warp) {
  ptx::give_registers_back<Traits::kProducerRegisters>();
  if (warp == 0) {
    if constexpr (Traits::kKeeps) {
      produce_runs<Traits>(params, shared);
    } else {
      produce<Traits>(params, shared);
    }
  } else if constexpr (Traits::kGathers) {
    gather<Traits>(params, shared, static_cast<int>(threadIdx.x) - kThreadsPerWarp);
  } else {
    if constexpr (Traits::kKeeps) {
      if (warp <= kConsumers) {
        Consumer<Traits>(params, shared, warp - 1).send_all();
        return;
      }
    }
    // Of a layer's `down` no others wait for all of `up`: it does not end before that, nor lets the
    // next kernel begin.
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    grouped_product_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(kSharedAlignment) unsigned char raw[];
  const Shared<Traits> shared{static_cast<uint32_t>(__cvta_generic_to_shared(raw)),
                              reinterpret_cast<Tile*>(raw + Traits::kTilesOffset)};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    // That read a stage.
    constexpr int kConsumerWarps = Traits::kAlternates ? 4 : 4 * kConsumers;
    ptx::prefetch_tensor_map(&params.weights[0]);
    ptx::prefetch_tensor_map(&params.weights[1]);
    if (!Traits::kWide) ptx::prefetch_tensor_map(&params.out[0]);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1 + (Traits::kGathers ? Traits::kGatherThreads : 0));
      ptx::mbarrier_init(shared.empty(stage), kCluster * kConsumerWarps);
    }
    for (int slot = 0; slot < Traits::kTileSlots; ++slot) {
      ptx::mbarrier_init(shared.known(slot), 1);
      if (!Traits::kGathers) ptx::mbarrier_init(shared.dealt(slot), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  if (Traits::kGathers) {
    if (thread == 0) fetch_ahead<Traits>(params);
    __syncwarp();
    ptx::wait_for_dependencies();
  }

  const int warp = __shfl_sync(kFullWarp, thread / kThreadsPerWarp, 0);
  // Asked so, and not whether it is 0, ptxas puts the code that loads first: nothing starts without
  // it, and behind other kernels code has to come from the memory.
  if (warp >= 4) {
    consume<Traits>(params, shared, warp / 4 - 1);
  } else {
    load<Traits>(params, shared, warp);
  }
  // The other block of the cluster may still load to this one.
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace flashmoe::moe::sm90
