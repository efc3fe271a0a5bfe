// The epilogue, from a consumer's products to rows of the output: weights of pairs, biases,
// activations, transposition by stmatrix, and stores by TMA.
#pragma once

#include <type_traits>

#include "cuda/moe/sm90/mainloop.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/storage.cuh"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.h"

namespace flashmoe::moe::sm90 {

// 1 + e^-z, bounded so that the product of two is finite and z divided by it is practically 0. It
// is finite for a NaN, too, so z must be a factor of the result.
__device__ __forceinline__ float sigmoid_divisor(float z) {
  constexpr float kMost = 62.0f;
  return 1.0f + numeric::exp2_approx(fminf(-kLog2E * z, kMost));
}

// The activation of z.
template <int kCurve>
__device__ __forceinline__ float activate(const Params& params, float z) {
  if constexpr (kCurve == kIdentity) {
    return z;
  } else if constexpr (kCurve == kSwish) {
    const float exponent = z * fmaf(params.swish_cube, z * z, params.swish_scale);
    return times_sigmoid(z, -exponent);
  } else if constexpr (kCurve == kGeluErf) {
    return gelu(z);
  } else {
    return relu(z, params.curve == kRelu2);
  }
}

template <class Traits>
struct Epilogue : MainLoop<Traits> {
  using Base = MainLoop<Traits>;
  using Base::Base;
  using Base::group;
  using Base::held;
  using Base::params;
  using Base::rows_before;
  using Base::sent;
  using Base::shared;
  using typename Base::Element;
  using typename Base::Numeric;

  __device__ __forceinline__ float bias_of(const Bias& bias, int expert, int row) const {
    if (row >= params.out_rows) return 0.0f;
    return load_bias<Element>(bias, expert, row);
  }

  // Stores the weights of the tile's pairs, or ones, in shared memory.
  __device__ __forceinline__ void load_scales(const Tile& tile) const {
    ptx::named_barrier_sync(kStoreBarrier + group,
                            kThreadsPerGroup);  // the previous tile's scales are no longer needed
    for (int i = thread_index() % kThreadsPerGroup; i < tile.tokens; i += kThreadsPerGroup) {
      float scale = 1.0f;
      if (params.pair_weights != nullptr) {
        const int pair = params.pairs[tile.first_slot + i];
        scale = pair >= 0 && pair < params.rows ? params.pair_weights[pair] : 0.0f;
      }
      ptx::store_shared(scales() + 4 * i, scale);
    }
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
  }
  __device__ __forceinline__ uint32_t scales() const {
    return shared.base + Traits::kScalesOffset + group * Traits::kScaleBytes;
  }

  __device__ __forceinline__ uint32_t out_buffer(int index) const {
    if (!Traits::kGathers) {
      // Computed anew so that no register is kept.
      const int group_here = Traits::kKeeps ? group : thread_index() / kThreadsPerGroup - 1;
      return shared.base + Traits::kOutOffset +
             (group_here * Traits::kOutBuffers + index) * Traits::kOutBytes;
    }
    const uint32_t from =
        index < kHalves ? shared.weights(held) + index * Traits::kHalfBytes : shared.tokens(held);
    return from + group * Traits::kOutBytes;
  }

  // The row, among this consumer's 64 rows of the output, of a thread's values with index e / 2.
  static __device__ __forceinline__ int row_of(int index) {
    const int warp = warp_of_group();
    const int lane = lane_index();
    if (Traits::kInterleaved) return lane / 4 % 2 * 32 + warp * 8 + lane / 8 + 4 * index;
    return warp * 16 + lane / 4 + 8 * index;
  }

  // Makes two 8x8 matrices for stmatrix from pairs of tokens, with the values of both rows of a
  // thread (row_of): rows 8 w to 8 w + 7 of a warp, and those 32 further on.
  static __device__ __forceinline__ void gather_rows(uint32_t& first, uint32_t& second) {
    const int lane = lane_index();
    const bool odd = lane / 4 % 2 != 0;
    const bool upper = lane >= 16;
    const int from = lane / 4 % 4 * 8 + (upper ? 4 : 0) + lane % 4;
    const uint32_t a = __shfl_sync(kFullWarp, odd ? second : first, from);
    const uint32_t b = __shfl_sync(kFullWarp, odd ? first : second, from ^ 4);
    first = upper ? b : a;
    second = upper ? a : b;
  }

  // Separates products whose rows of gate and up are interleaved into gates (first) and ups
  // (second) of the rows of row_of. Lanes with a gate row keep the gates of the first 64 rows and
  // get their ups. The others keep the ups of the next 64 rows and get their gates.
  template <int kTokens>
  static __device__ __forceinline__ void take_apart(Products<kTokens>& products) {
    const bool odd = lane_index() / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const float given = odd ? products.first[i] : products.second[i];
      const float got = __shfl_xor_sync(kFullWarp, given, 4);
      products.first[i] = odd ? got : products.first[i];
      products.second[i] = odd ? products.second[i] : got;
    }
  }

  // The rows of the output that a tile's tokens have, known to be uniform: operands of copies.
  struct OutRows {
    int first_slot;
    int tokens;
    int batch;
  };
  // Whole warps call it.
  __device__ __forceinline__ OutRows out_rows_of(const Tile& tile) const {
    return {uniform(tile.first_slot), uniform(tile.tokens),
            params.counts != nullptr ? uniform(tile.expert) : 0};
  }

  // Writes 64 rows of values of all tokens, transposed, from `column` on in the tokens' rows.
  // values(block, v) returns the values of a block of 8 tokens. `sent` counts the parts that have
  // been sent.
  template <int kTokens, class Values>
  __device__ __forceinline__ void store(const Tile& tile, const CUtensorMap (&maps)[kOutHeights],
                                        int column, int* sent, const Values& values) const {
    constexpr int kPairs = Traits::kOutTokens / 16;  // of blocks of 8 tokens: one stmatrix each
    constexpr int kParts = ceil_div(kTokens, Traits::kOutTokens);
    const int lane = lane_index();
    const int warp = warp_of_group();
    const bool leader = warp == 0 && lane == 0;
    const int matrix_row = lane % 8;
    const int chunk = Traits::kInterleaved ? warp + 4 * (lane / 8 % 2) : 2 * warp + lane / 8 % 2;
    const uint32_t lane_offset =
        (lane / 16 * 8 + matrix_row) * kBoxRowBytes + ((chunk ^ matrix_row) * 16);
    const OutRows out_rows = out_rows_of(tile);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int buffer = *sent % Traits::kOutBuffers;
      const uint32_t to = uniform(out_buffer(buffer));
      // Waits for the previous store from this buffer.
      if (Traits::kKeeps) {
        if (*sent >= Traits::kOutBuffers) wait_drained(buffer);
      } else {
        if (leader && *sent >= Traits::kOutBuffers) {
          ptx::tma_store_wait_read_but<Traits::kOutBuffers - 1>();
        }
        if (Traits::kStoresByTokens && *sent == kHalves) {
          ptx::named_barrier_sync(kTokensBarrier, kConsumers * kThreadsPerGroup);
        } else {
          ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
        }
      }
      ++*sent;
#pragma unroll
      for (int i = 0; i < kPairs && part * kPairs + i < kTokens / 16; ++i) {
        uint32_t packed[4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          float v[4];
          values(2 * (part * kPairs + i) + block, v);
          packed[2 * block] = Numeric::pack(v[0], v[1]);
          packed[2 * block + 1] = Numeric::pack(v[2], v[3]);
          if (Traits::kInterleaved) gather_rows(packed[2 * block], packed[2 * block + 1]);
        }
        ptx::stmatrix_x4_trans(to + lane_offset + i * 16 * kBoxRowBytes, packed[0], packed[1],
                               packed[2], packed[3]);
      }
      if (Traits::kKeeps) {
        ptx::named_barrier_arrive(filled(buffer), kFillingThreads);
        continue;
      }
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (leader) {
        ptx::fence_proxy_async_shared();  // once, for the stores of all threads
        send(out_rows, maps, column, part * Traits::kOutTokens, to);
        ptx::tma_store_commit();
      }
    }
  }

  // The named barriers of a buffer.
  __device__ __forceinline__ int filled(int buffer) const {
    return kFilledBarrier + group * Traits::kOutBuffers + buffer;
  }
  __device__ __forceinline__ int drained(int buffer) const {
    return kDrainedBarrier + group * Traits::kOutBuffers + buffer;
  }
  __device__ __forceinline__ void wait_drained(int buffer) const {
    ptx::named_barrier_sync(drained(buffer), kFillingThreads);
  }

  // Sends the contents of this consumer's buffers, part after part of its tiles. One warp of the
  // first warpgroup does so. The consumer then only waits for the buffer that it needs next.
  __device__ __forceinline__ void send_all() {
    const bool leader = lane_index() == 0;
    for (int number = 0;; ++number) {
      const int slot = number % Traits::kTileSlots;
      ptx::mbarrier_wait(shared.known(slot), number / Traits::kTileSlots % 2);
      const Tile& tile = shared.tiles[slot];
      if (tile.units == 0) break;
      const OutRows out_rows = out_rows_of(tile);
      const int row = uniform(tile.row_tile) * Traits::kOutRows + rows_before();
      for (int first = 0; first < tile.units * kUnitTokens; first += Traits::kOutTokens) {
        const int buffer = sent % Traits::kOutBuffers;
        ++sent;
        ptx::named_barrier_sync(filled(buffer), kFillingThreads);
        if (leader) {
          ptx::fence_proxy_async_shared();  // once, for the stores of all threads
          send(out_rows, params.out, row, first, out_buffer(buffer));
          ptx::tma_store_commit();
          ptx::tma_store_wait_read();
        }
        __syncwarp();
        ptx::named_barrier_arrive(drained(buffer), kFillingThreads);
      }
    }
    if (leader) ptx::tma_store_wait();
    __syncwarp();
  }

  // At the end: completes the barriers of buffers that nobody fills again.
  __device__ __forceinline__ void wait_sent() const {
    for (int buffer = 0; buffer < min(sent, Traits::kOutBuffers); ++buffer) wait_drained(buffer);
  }

  // Sends the rows of at most kOutTokens existing tokens from `first` on. One thread calls it.
  __device__ __forceinline__ void send(const OutRows& out, const CUtensorMap (&maps)[kOutHeights],
                                       int column, int first, uint32_t from) const {
    constexpr int kBoxRows[] = {kOutBoxRows[0], kOutBoxRows[1], kOutBoxRows[2]};
    if (column >= params.out_rows) return;
    const int rows = min(Traits::kOutTokens, out.tokens - first);
    if (rows == Traits::kOutTokens) {
      static_assert(Traits::kOutTokens % kBoxRows[0] == 0);
#pragma unroll
      for (int row = 0; row < Traits::kOutTokens; row += kBoxRows[0]) {
        ptx::tma_store(&maps[0], from + row * kBoxRowBytes, column, out.first_slot + first + row,
                       out.batch, 0);
      }
      return;
    }
    int row = 0;
#pragma unroll
    for (int height = 0; height < kOutHeights; ++height) {
#pragma unroll 1
      for (; row + kBoxRows[height] <= rows; row += kBoxRows[height]) {
        ptx::tma_store(&maps[height], from + row * kBoxRowBytes, column,
                       out.first_slot + first + row, out.batch, 0);
      }
    }
  }

  // Products with the terms before the activation: the weights of the tokens' pairs and the bias.
  template <int kCount>
  struct Adjusted {
    const float (&products)[kCount];
    uint32_t scales;
    float biases[2];  // of a thread's two rows

    __device__ __forceinline__ Adjusted(const Epilogue& consumer, const float (&products_)[kCount],
                                        const Bias& bias, int expert, int first_row)
        : products(products_), scales(consumer.scales()) {
      biases[0] = biases[1] = 0.0f;
      if (bias.data != nullptr) {
        biases[0] = consumer.bias_of(bias, expert, first_row + row_of(0));
        biases[1] = consumer.bias_of(bias, expert, first_row + row_of(1));
      }
    }

    __device__ __forceinline__ void operator()(int block, float (&v)[4]) const {
      float2 factors{1.0f, 1.0f};
      if (Traits::kGathers) {
        factors = ptx::load_shared_float2(scales + (8 * block + lane_index() % 4 * 2) * 4);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] = fmaf(products[4 * block + e], e % 2 == 0 ? factors.x : factors.y, biases[e / 2]);
      }
    }
  };

  // Stores one half of products without a gate.
  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_half(const Tile& tile, const float (&half)[kTokens / 2],
                                              int row, int* sent) const {
    const Adjusted<kTokens / 2> z(*this, half, params.bias[0], tile.expert, row);
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
      z(block, v);
      if constexpr (kCurve != kIdentity) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = activate<kCurve>(params, cut(v[e], params.limit));
      }
    });
  }

  // Stores the activation of the first half times the second.
  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_gated(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    const Adjusted<kTokens / 2> gate(*this, products.first, params.bias[0], tile.expert, row);
    const Adjusted<kTokens / 2> up(*this, products.second, params.bias[1], tile.expert, row);
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
      float factors[4];
      gate(block, v);
      up(block, factors);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] = activate<kCurve>(params, cut_above(v[e], params.limit)) *
               (cut(factors[e], params.limit) + params.up_offset);
      }
    });
  }

  // Stores one half of products that need no adjustment.
  template <int kTokens>
  __device__ __forceinline__ void store_half(const Tile& tile,
                                             const CUtensorMap (&maps)[kOutHeights],
                                             const float (&half)[kTokens / 2], int row,
                                             int* sent) const {
    store<kTokens>(tile, maps, row, sent, [&](int block, float (&v)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = half[4 * block + e];
    });
  }

  // The activation of the first half times the second, for SiLU and products that need no
  // adjustment.
  template <int kTokens>
  __device__ __forceinline__ void finish_plain(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    store<kTokens>(tile, params.out, row, sent, [&](int block, float (&v)[4]) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        // One reciprocal serves two values: the MUFU unit is the bottleneck here.
        const float z0 = products.first[4 * block + e];
        const float z1 = products.first[4 * block + e + 1];
        const float d0 = sigmoid_divisor(z0);
        const float d1 = sigmoid_divisor(z1);
        const float inverse = reciprocal(d0 * d1);
        v[e] = z0 * products.second[4 * block + e] * (inverse * d1);
        v[e + 1] = z1 * products.second[4 * block + e + 1] * (inverse * d0);
      }
    });
  }

  template <int kCurve, int kTokens>
  __device__ __forceinline__ void finish_curve(const Tile& tile, const Products<kTokens>& products,
                                               int row, int* sent) const {
    if constexpr (Traits::kGated) {
      finish_gated<kCurve, kTokens>(tile, products, row, sent);
    } else {
      finish_half<kCurve, kTokens>(tile, products.first, row, sent);
      finish_half<kCurve, kTokens>(tile, products.second, row + Traits::kHalfRows, sent);
    }
  }

  // Stores the activation's input. It is one function for all curves because it is much code.
  template <int kTokens>
  __device__ __forceinline__ void store_pre_activation(const Tile& tile,
                                                       const Products<kTokens>& products, int row,
                                                       int* sent) const {
    constexpr int kUp = Traits::kGated ? 1 : 0;
    const int second_row = Traits::kGated ? row : row + Traits::kHalfRows;
    const Adjusted<kTokens / 2> first(*this, products.first, params.bias[0], tile.expert, row);
    const Adjusted<kTokens / 2> second(*this, products.second, params.bias[kUp], tile.expert,
                                       second_row);
    store<kTokens>(tile, params.pre_activation[0], row, sent, first);
    store<kTokens>(tile, params.pre_activation[kUp], second_row, sent, second);
  }

  // Stores 64 rows of products of all tokens as fp32, or accumulates them. Eight lanes have
  // consecutive numbers of a token.
  template <class T, int kTokens>
  __device__ __forceinline__ void store_wide(const Tile& tile, const float (&half)[kTokens / 2],
                                             int row) const {
    const int token = lane_index() % 4 * 2;
    const int64_t batch = params.counts != nullptr ? tile.expert : 0;
    const int64_t stride = params.wide_row_stride;
    T* to = static_cast<T*>(params.wide_out) + batch * params.wide_batch_stride +
            (tile.first_slot + token) * stride + row + row_of(0);
    const bool has[2] = {row + row_of(0) < params.out_rows, row + row_of(1) < params.out_rows};
#pragma unroll
    for (int block = 0; block < kTokens / 8; ++block, to += 8 * stride) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has[e / 2] || 8 * block + token + e % 2 >= tile.tokens) continue;
        T* const place = to + e % 2 * stride + e / 2 * 8;
        float sum = half[4 * block + e];
        if constexpr (std::is_same_v<T, float>) {
          if (params.wide_adds != 0) sum += *place;
          *place = sum;
        } else {
          sum += Numeric::to_float(*place);  // kDown stores 16 bits without accumulation
          *place = static_cast<uint16_t>(Numeric::pack(sum, 0.0f));
        }
      }
    }
  }

  // Finishes a tile's products.
  template <int kTokens>
  __device__ __forceinline__ void finish(const Tile& tile, Products<kTokens>& products) {
    if (Traits::kInterleaved) take_apart(products);
    // This group's rows in the first half.
    const int row = uniform(tile.row_tile) * Traits::kOutRows + rows_before();
    if (Traits::kGathers) sent = 0;
    if constexpr (Traits::kWide) {
      if (params.wide_is_fp32 != 0) {
        store_wide<float, kTokens>(tile, products.first, row);
        store_wide<float, kTokens>(tile, products.second, row + Traits::kHalfRows);
      } else {
        store_wide<uint16_t, kTokens>(tile, products.first, row);
        store_wide<uint16_t, kTokens>(tile, products.second, row + Traits::kHalfRows);
      }
    } else if constexpr (!Traits::kGathers) {
      finish_curve<kIdentity, kTokens>(tile, products, row, &sent);
    } else if constexpr (Traits::kPlain) {
      if (params.pre_activated != 0) {
        store_half<kTokens>(tile, params.pre_activation[0], products.first, row, &sent);
        store_half<kTokens>(tile, params.pre_activation[1], products.second, row, &sent);
      }
      finish_plain<kTokens>(tile, products, row, &sent);
    } else {
      load_scales(tile);
      if (params.pre_activated != 0) {
        store_pre_activation<kTokens>(tile, products, row, &sent);
      }
      if (params.curve == kSwish) {
        finish_curve<kSwish, kTokens>(tile, products, row, &sent);
      } else if (params.curve == kGeluErf) {
        finish_curve<kGeluErf, kTokens>(tile, products, row, &sent);
      } else {
        finish_curve<kRelu, kTokens>(tile, products, row, &sent);
      }
    }
  }
};

}  // namespace flashmoe::moe::sm90
