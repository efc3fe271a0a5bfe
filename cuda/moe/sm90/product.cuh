// Grouped GEMM on sm_90, warp-specialised and persistent.
//
//   up     a[s] = act(w_gate[e] x[t]) * (w_up[e] x[t])     slot s of expert e, of token t
//   down   y[s] = w_down[e] a[s] + bias[e]
//
// Weights are the M side of wgmma and tokens the N side: up to 192 tokens of an expert, in steps of
// 64 columns. So the width of a tile, which the device chooses for each expert, may be any multiple
// of 8, and a thread holds gate and up of the same element. A consumer warpgroup has 128 rows of
// weights, 64 of either half, and all tokens of a tile: up to 192 accumulators per thread. In `up`
// its two consumers share a tile of 256 rows (128 of the gate and the same 128 of up). In `down`
// each has a tile of its own and they alternate, so that one's products overlap the other's stores.
//
// The first warpgroup loads. One warp issues the TMA copies of weights (and in `down` of tokens),
// and three gather the rows of tokens by cp.async. Both arrive at the stage's mbarrier.
//
// Weights with interleaved rows of gate and up come in boxes of 64 rows, 32 of either. Neighbouring
// boxes complement each other: a thread has gates of one row, and the thread four lanes further has
// the ups of the same row. They exchange their values after the products (take_apart).
//
// Blocks come in clusters of two, which take the same steps. In `up` the two have neighbouring
// token tiles of the same weights, and each loads one half of these for both. For the last of an
// odd number of token tiles, and in `down` always, they have neighbouring weight rows of the same
// tokens; in `down` each loads one half of these for both.
//
// If rows of `down` are short, storing a tile's output takes longer than its products. In that case
// (Use::kShortDown) a consumer keeps the weights of 64 rows in registers while a run of the
// expert's token tiles passes by. Both consumers multiply each of these tiles in turns, and two
// warps of the first warpgroup send the results that they leave in shared memory.
//
// A layer's `down` begins while `up` still runs. Its blocks occupy multiprocessors as blocks of
// `up` leave them, wait for the tokens of one expert at a time (Progress), and take items one by
// one (Deal).
//
// The parts: scheduler.cuh determines the next tile, progress.cuh the progress of `up`.
// producer.cuh and gather.cuh load, mainloop.cuh multiplies, epilogue.cuh stores, and consumer.cuh
// combines the last two.
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
    // Only this thread lets `down` begin. The second consumer announces nothing before it has
    // waited for the first one (kLagBarrier), and thus for this.
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
    // No other warps of a layer's `down` wait for all of `up`. So it does not end before `up`, nor
    // lets the next kernel begin.
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
    // Warps that read a stage.
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

  const int warp = uniform(thread / kThreadsPerWarp);
  // With this form of the condition, instead of a test for 0, ptxas puts the load code first.
  // Nothing starts without that code, and after other kernels code must come from memory.
  if (warp >= 4) {
    consume<Traits>(params, shared, warp / 4 - 1);
  } else {
    load<Traits>(params, shared, warp);
  }
  // The other block of the cluster may still load into this one.
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace flashmoe::moe::sm90
