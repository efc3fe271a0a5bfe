// Grouped products with mma.sync: the rows of every expert by its weights.
//
//   out[r] = w[e] x[r] + b[e]                        plain
//   out[r] = act(gate[e] x[r] + ...) * (up[e] x[r] + ...)    gated
//
// The weights are the left operand, the tokens the right one, so that a tile may have few tokens:
// 128 weight rows by 32 to 256 tokens, chosen tile by tile from the rows that are there. A block is
// persistent. All of its warps copy steps of 32 columns into a ring of kStages stages by cp.async and
// multiply what arrived, with one block barrier a step; the copies run on into the next tile while a
// tile is finished. Fragments are read one slice of 16 columns ahead of their products.
#pragma once

#include "cuda/moe/sm89/epilogue.cuh"
#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/schedule.cuh"
#include "cuda/moe/sm89/tiles.cuh"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::moe::sm89 {

// Copies the steps of this block's tiles in their order. Between two calls of load_step there is a
// block barrier.
template <class Traits>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params& params, ScheduleStorage& storage,
                                    uint32_t stages)
      : params_(params), storage_(storage), stages_(stages), schedule_(params) {
    if (warp_index() == 0) {
      schedule_.look_up(params_, storage_, 0);
      schedule_.look_up(params_, storage_, 1);
    }
    __syncthreads();
    tokens_.look_ahead(params_, storage_.ring[0]);
    begin_tile();
  }

  // Copies the next step, if there is one, and closes its group in any case.
  __device__ __forceinline__ void load_step() {
    if (columns_left_ > 0) {
      const uint32_t stage = stages_ + stage_ * Traits::kStageBytes;
#ifndef NOLOAD
      if (columns_left_ >= Traits::kStepColumns) {
        weights_.template load_next<true>(stage, columns_left_);
        tokens_.template load_next<true>(stage, columns_left_);
      } else {
        weights_.template load_next<false>(stage, columns_left_);
        tokens_.template load_next<false>(stage, columns_left_);
      }
#endif
      columns_left_ -= Traits::kStepColumns;
      if (columns_left_ <= 0) {
        ++tile_;
        begin_tile();
      }
    }
    ptx::cp_async_commit();
    stage_ = stage_ + 1 < Traits::kStages ? stage_ + 1 : 0;
  }

 private:
  // Tile tile_, while the one after it is looked ahead to, and the next one looked up.
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
      reader.read_tokens(tokens[pair], stage, pair, slice);
    }
  }

  __device__ __forceinline__ void multiply(
      float (&d)[kTokenFragments][Traits::kRowFragments][4]) const {
#ifdef NOMMA
    for(int m=0;m<Traits::kRowFragments;++m) for(int i=0;i<4;++i) asm volatile(""::"r"(weights[m][i]));
    for(int m=0;m<kPairs;++m) for(int i=0;i<4;++i) asm volatile(""::"r"(tokens[m][i]));
    return;
#endif
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

// Computes one tile of at most kTokenFragments * kTokensPerFragment tokens. `stage` is that of its
// first step, and then of the first one behind it.
template <class Traits, int kTokenFragments>
__device__ __forceinline__ void compute_tile(const Params& params, const Tile& tile,
                                             Loader<Traits>& loader,
                                             uint32_t stages, uint32_t& stage) {
  static_assert(Traits::kSlices == 2);
  const auto warp_m = [] { return warp_index() % Traits::kWarpsM; };
  const auto first_token = [] { return warp_index() / Traits::kWarpsM * kTokenFragments * 8; };
  const FragmentReader<Traits> reader(warp_m(), first_token());
  float d[kTokenFragments][Traits::kRowFragments][4];
#pragma unroll
  for (int i = 0; i < kTokenFragments * Traits::kRowFragments * 4; ++i) {
    d[i / 4 / Traits::kRowFragments][i / 4 % Traits::kRowFragments][i % 4] = 0.0f;
  }
  // The oldest step under way has arrived, and the one before it has been read by all.
  const auto wait = [] {
    ptx::cp_async_wait<Traits::kStages - 2>();
    __syncthreads();
  };
  const auto address = [&] { return stages + stage * Traits::kStageBytes; };
  const auto advance = [&] { stage = stage + 1 < Traits::kStages ? stage + 1 : 0; };

  Fragments<Traits, kTokenFragments> fragments[2];
  wait();
  fragments[0].read(reader, address(), 0);
  for (int columns = params.columns; columns > Traits::kStepColumns;
       columns -= Traits::kStepColumns) {
    loader.load_step();
    fragments[1].read(reader, address(), 1);
    fragments[0].multiply(d);
    advance();
    wait();
    fragments[0].read(reader, address(), 0);
    fragments[1].multiply(d);
  }
  fragments[1].read(reader, address(), 1);
  loader.load_step();
  fragments[0].multiply(d);
  fragments[1].multiply(d);
  advance();

  Epilogue<Traits> epilogue(params, tile, warp_m());
  const int first = first_token();
#pragma unroll
  for (int n = 0; n < kTokenFragments; ++n) epilogue.store(d[n], first + 8 * n);
}

// That a tile is computed with.
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

  Schedule<Traits>::sum_up(params, storage);
  Loader<Traits> loader(params, storage, stages);
  for (int step = 0; step < Traits::kStages - 1; ++step) {
    loader.load_step();
    __syncthreads();
  }
  uint32_t stage = 0;
  for (int number = 0;; ++number) {
    const Tile tile = storage.ring[number % kTileRing];
    if (tile.expert < 0) break;
    const auto compute = [&](auto fragments) {
      compute_tile<Traits, decltype(fragments)::value>(params, tile, loader, stages, stage);
    };
    if (tile.rows > 6 * Traits::kTokensPerFragment) {
      compute(TokenFragments<8>());
    } else if (tile.rows > 4 * Traits::kTokensPerFragment) {
      compute(TokenFragments<6>());
    } else if (tile.rows > 2 * Traits::kTokensPerFragment) {
      compute(TokenFragments<4>());
    } else if (tile.rows > Traits::kTokensPerFragment) {
      compute(TokenFragments<2>());
    } else {
      compute(TokenFragments<1>());
    }
  }
  ptx::cp_async_wait<0>();
}

}  // namespace flashmoe::moe::sm89
