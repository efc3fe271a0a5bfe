// Grouped GEMM with mma.sync: multiplies the rows of every expert by its weights.
//
//   out[r] = w[e] x[r] + b[e]                        plain
//   out[r] = act(gate[e] x[r] + ...) * (up[e] x[r] + ...)    gated
//
// The weights are the left operand and the tokens the right one, so that a tile may have few
// tokens: 128 weight rows by 32 to 288 tokens, chosen per tile from the existing rows. A block is
// persistent. All of its warps copy steps of 32 columns into a ring of kStages stages by cp.async
// and multiply what has arrived; the copies continue with the next tile while a tile is finished.
// Fragments are read one slice of 16 columns ahead of their products. The block's one barrier per
// step has the products of a slice between arriving and waiting.
#pragma once

#include "cuda/moe/sm89/epilogue.cuh"
#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/schedule.cuh"
#include "cuda/moe/sm89/tiles.cuh"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe::sm89 {

// Copies the steps of this block's tiles in their order. A block barrier precedes each call of
// load_step: the call may begin the next tile, which reads what warp 0 looked up at the beginning
// of this one, possibly in the constructor.
template <class Traits>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params& params, ScheduleStorage& storage, uint32_t stages)
      : params_(params), storage_(storage), stages_(stages), schedule_(params) {
    if (warp_index() == 0) {
      schedule_.look_up(params_, storage_, 0);
      schedule_.look_up(params_, storage_, 1);
    }
    __syncthreads();
    tokens_.look_ahead(params_, storage_.ring[0]);
    begin_tile();
  }

  // The number of steps that load_full_step may load.
  __device__ __forceinline__ int full_steps() const {
    return max(columns_left_ - 1, 0) / Traits::kStepColumns;
  }

  // Copies the next step, which is full and not a tile's last. It has no branches, so that it may
  // be scheduled among products. Closes its group.
  __device__ __forceinline__ void load_full_step() {
    load<true>();
    columns_left_ -= Traits::kStepColumns;
    close();
  }

  // Copies the next step, if there is one. Closes its group in any case.
  __device__ __forceinline__ void load_step() {
    if (columns_left_ > 0) {
      if (columns_left_ >= Traits::kStepColumns) {
        load<true>();
      } else {
        load<false>();
      }
      columns_left_ -= Traits::kStepColumns;
      if (columns_left_ <= 0) {
        ++tile_;
        begin_tile();
      }
    }
    close();
  }

 private:
  // Begins tile tile_, looks ahead to the one after it, and looks up the next one.
  __device__ __forceinline__ void begin_tile() {
    const Tile tile = storage_.ring[tile_ % kTileRing];
    columns_left_ = 0;
    if (tile.expert < 0) return;
    columns_left_ = params_.columns;
    weights_.begin(params_, tile);
    tokens_.begin(params_, tile);
    tokens_.look_ahead(params_, storage_.ring[(tile_ + 1) % kTileRing]);
    if (warp_index() == 0) schedule_.look_up(params_, storage_, tile_ + 2);
  }

  template <bool kFull>
  __device__ __forceinline__ void load() {
    const uint32_t stage = stages_ + stage_ * Traits::kStageBytes;
    weights_.template load_next<kFull>(stage, columns_left_);
    tokens_.template load_next<kFull>(stage, columns_left_);
  }

  __device__ __forceinline__ void close() {
    ptx::cp_async_commit();
    stage_ = stage_ + 1 < Traits::kStages ? stage_ + 1 : 0;
  }

  const Params& params_;
  ScheduleStorage& storage_;
  uint32_t stages_;
  Schedule<Traits> schedule_;
  WeightLoader<Traits> weights_;
  TokenLoader<Traits> tokens_;
  int tile_ = 0;
  int columns_left_ = 0;
  uint32_t stage_ = 0;
};

// The block's barrier of a step: the next step has arrived, and this step's fragments have been
// read. It has two halves, with products between them.
template <class Traits>
class StepBarrier {
 public:
  __device__ __forceinline__ explicit StepBarrier(ScheduleStorage& storage)
      : address_(static_cast<uint32_t>(__cvta_generic_to_shared(&storage.step_barrier))) {}

  __device__ __forceinline__ void init() const { ptx::mbarrier_init(address_, Traits::kThreads); }

  // Every lane arrives. One arrival for all would be no faster, and compute-sanitizer would take
  // the other lanes' copies for a race. The arrival is behind a branch that ptxas cannot resolve:
  // in straight code ptxas moves products past it, and spills.
  __device__ __forceinline__ void arrive() const {
    ptx::cp_async_wait<Traits::kStages - 2>();
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    if (lane < kThreadsPerWarp) ptx::mbarrier_arrive(address_);
  }
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_wait(address_, parity_);
#else
    ptx::mbarrier_spin(address_, parity_);
#endif
    parity_ ^= 1;
  }

 private:
  uint32_t address_;
  uint32_t parity_ = 0;
};

// A warp's fragments of one slice.
template <class Traits, int kTokenFragments>
struct Fragments {
  static constexpr int kPairs = (kTokenFragments + 1) / 2;
  uint32_t weights[Traits::kRowFragments][4];
  uint32_t tokens[kPairs][4];

  __device__ __forceinline__ void read(const FragmentReader<Traits>& reader, uint32_t stage,
                                       int slice) {
#pragma unroll
    for (int m = 0; m < Traits::kRowFragments; ++m) {
      reader.read_weights(weights[m], stage, m, slice);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      reader.read_tokens(tokens[pair], stage, pair, slice, 2 * pair + 1 < kTokenFragments);
    }
  }

  __device__ __forceinline__ void multiply(
      float (&d)[kTokenFragments][Traits::kRowFragments][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenFragments; ++n) {
#pragma unroll
      for (int m = 0; m < Traits::kRowFragments; ++m) {
        ptx::mma_m16n8k16<typename Traits::Element>(d[n][m], weights[m], tokens[n / 2][n % 2 * 2],
                                                    tokens[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

// Computes one tile of at most kTokenFragments * kTokensPerFragment tokens. Its first step has
// arrived, and at the end the next tile's first step has. `stage` is that of the former and then of
// the latter.
template <class Traits, int kTokenFragments>
__device__ __forceinline__ void compute_tile(const Params& params, const Tile& tile,
                                             Loader<Traits>& loader, StepBarrier<Traits>& barrier,
                                             uint32_t stages, uint32_t& stage) {
  const auto warp_m = [] { return warp_index() % Traits::kWarpsM; };
  const auto first_token = [] { return warp_index() / Traits::kWarpsM * kTokenFragments * 8; };
  const FragmentReader<Traits> reader(warp_m(), first_token());
  float d[kTokenFragments][Traits::kRowFragments][4];
#pragma unroll
  for (int i = 0; i < kTokenFragments * Traits::kRowFragments * 4; ++i) {
    d[i / 4 / Traits::kRowFragments][i / 4 % Traits::kRowFragments][i % 4] = 0.0f;
  }
  const auto address = [&] { return stages + stage * Traits::kStageBytes; };
  const auto advance = [&] { stage = stage + 1 < Traits::kStages ? stage + 1 : 0; };
  Fragments<Traits, kTokenFragments> fragments[2];
  // Computes the slices of a step except the last, up to where its stage may be loaded again. The
  // wait at the barrier is a loop. It keeps ptxas from mixing the products of the last slice among
  // these, where their fragments have not been read yet.
  constexpr int kLast = Traits::kSlices - 1;
  static_assert(kLast % 2 == 1,
                "the first slice's fragments are in the one place, the last's in the other");
  const auto first_slices = [&] {
#pragma unroll
    for (int slice = 0; slice < kLast; ++slice) {
      fragments[(slice + 1) % 2].read(reader, address(), slice + 1);
      if (slice == kLast - 1) barrier.arrive();
      fragments[slice % 2].multiply(d);
    }
    advance();
    barrier.wait();
  };

  fragments[0].read(reader, address(), 0);
  int steps = ceil_div<Traits::kStepColumns>(params.columns);
  while (true) {
    for (int i = min(steps - 1, loader.full_steps()); i > 0; --i) {
      first_slices();
      fragments[0].read(reader, address(), 0);
      loader.load_full_step();
      fragments[1].multiply(d);
      --steps;
    }
    first_slices();
    loader.load_step();
    if (--steps == 0) break;
    fragments[0].read(reader, address(), 0);
    fragments[1].multiply(d);
  }
  fragments[1].multiply(d);

  Epilogue<Traits> epilogue(params, tile, warp_m());
  epilogue.store_all(d, first_token());
}

// The number of fragments of a tile's computation.
template <int kCount>
struct TokenFragments {
  static constexpr int value = kCount;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    grouped_product_kernel(const __grid_constant__ Params params) {
  static_assert(kScheduleFits<Traits>);
  extern __shared__ __align__(1024) unsigned char shared[];
  ScheduleStorage& storage = *reinterpret_cast<ScheduleStorage*>(shared + Traits::kScheduleOffset);
  const uint32_t stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  Schedule<Traits>::sum_up(params, storage, reinterpret_cast<int*>(shared));
  static_assert(Schedule<Traits>::kScratchBytes <= Traits::kScheduleOffset);
  StepBarrier<Traits> barrier(storage);
  if (thread_index() == 0) barrier.init();
  Loader<Traits> loader(params, storage, stages);
  for (int step = 0; step < Traits::kStages; ++step) {
    __syncthreads();
    loader.load_step();
  }
  ptx::cp_async_wait<Traits::kStages - 1>();
  __syncthreads();
  uint32_t stage = 0;
  for (int number = 0;; ++number) {
    const Tile tile = storage.ring[number % kTileRing];
    if (tile.expert < 0) break;
    const auto compute = [&](auto fragments) {
      compute_tile<Traits, decltype(fragments)::value>(params, tile, loader, barrier, stages,
                                                       stage);
    };
    switch (ceil_div<Traits::kTokensPerFragment>(tile.rows)) {
      case 1: compute(TokenFragments<1>()); break;
      case 2: compute(TokenFragments<2>()); break;
      case 3:
      case 4: compute(TokenFragments<4>()); break;
      case 5: compute(TokenFragments<5>()); break;
      case 6: compute(TokenFragments<6>()); break;
      case 7:
      case 8: compute(TokenFragments<8>()); break;
      default: compute(TokenFragments<Traits::kMaxTokenFragments>());
    }
  }
  ptx::cp_async_wait<0>();
}

}  // namespace flashmoe::moe::sm89
