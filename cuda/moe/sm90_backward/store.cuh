// From a consumer's sums to a gradient in the caller's layout: 16 bits or fp32, either of its two
// strides 1, written or added to.
#pragma once

#include "cuda/moe/sm90_backward/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90_backward {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

// Transposes a 4 x 4 matrix of words, a row of which each of four neighbouring lanes has.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const int lane = lane_index();
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if ((low & bit) != 0) continue;
      const int high = low + bit;
      const uint32_t given = upper ? words[low] : words[high];
      const uint32_t got = __shfl_xor_sync(kFullWarp, given, bit);
      words[low] = upper ? got : words[low];
      words[high] = upper ? words[high] : got;
    }
  }
}

// 64 rows by 2 kSums columns of a tile, from (m, n) on. Extents are multiples of 8: a block of 8 by
// 8 elements lies within them or beyond. Of a thread sums[4 j + e] is row 16 w + g + 8 (e / 2) and
// column 8 j + 2 t + e % 2, with its warp w, g = lane / 4 and t = lane % 4.
template <class Element, int kSums>
struct TileStore {
  using Numeric = numeric::ElementTraits<Element>;
  static constexpr int kBlocks = kSums / 4;  // of 8 columns

  const Params& params;
  int expert;
  int m;
  int n;

  __device__ __forceinline__ int64_t place(int row, int column) const {
    return expert * params.expert_stride + row * params.m_stride + column * params.n_stride;
  }
  template <class T>
  __device__ __forceinline__ T* at(int row, int column) const {
    return static_cast<T*>(params.out) + place(row, column);
  }

  __device__ __forceinline__ void run(float (&sums)[kSums]) const {
    const int row = m + warp_of_group() * 16;
    const bool has[2] = {row < params.m, row + 8 < params.m};
    if (!has[0]) return;
    if (params.is_fp32 != 0) {
      if (params.n_stride == 1) {
        store_pairs(sums, row, has);
      } else {
        store_each(sums, row, has);
      }
      return;
    }
    if (params.accumulate != 0) add_old(sums, row, has);
    if (params.n_stride == 1) {
      store_rows(sums, row, has);
    } else {
      store_columns(sums, row, has);
    }
  }

  // fp32 whose columns lie next to each other.
  __device__ __forceinline__ void store_pairs(const float (&sums)[kSums], int row,
                                              const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has[half]) continue;
      float* const to = at<float>(row + 8 * half + lane / 4, n + lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (n + 8 * j >= params.n) continue;
        float2* const pair = reinterpret_cast<float2*>(to + 8 * j);
        float2 value{sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        if (params.accumulate != 0) {
          const float2 old = *pair;
          value.x += old.x;
          value.y += old.y;
        }
        *pair = value;
      }
    }
  }

  // fp32 whose rows lie next to each other: eight lanes have as many of a column.
  __device__ __forceinline__ void store_each(const float (&sums)[kSums], int row,
                                             const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (n + 8 * j >= params.n) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has[e / 2]) continue;
        float* const to = at<float>(row + 8 * (e / 2) + lane / 4, n + 8 * j + lane % 4 * 2 + e % 2);
        *to = params.accumulate != 0 ? *to + sums[4 * j + e] : sums[4 * j + e];
      }
    }
  }

  // Adds what 16-bit gradients hold.
  __device__ __forceinline__ void add_old(float (&sums)[kSums], int row,
                                          const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (n + 8 * j >= params.n) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has[e / 2]) continue;
        sums[4 * j + e] += Numeric::to_float(
            *at<uint16_t>(row + 8 * (e / 2) + lane / 4, n + 8 * j + lane % 4 * 2 + e % 2));
      }
    }
  }

  // 16 bits whose columns lie next to each other: a lane gathers 8 of a row, and four lanes have
  // neighbouring ones.
  __device__ __forceinline__ void store_rows(const float (&sums)[kSums], int row,
                                             const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has[half]) continue;
      uint16_t* const to = at<uint16_t>(row + 8 * half + lane / 4, n + lane % 4 * 8);
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at_sum = 4 * (j + i) + 2 * half;
          words[i] = Numeric::pack(sums[at_sum], sums[at_sum + 1]);
        }
        transpose_quad(words);
        if (n + 8 * (j + lane % 4) < params.n) {
          *reinterpret_cast<uint4*>(to + 8 * j) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // 16 bits whose rows lie next to each other: a lane gathers 8 of a column.
  __device__ __forceinline__ void store_columns(const float (&sums)[kSums], int row,
                                                const bool (&has)[2]) const {
    const int lane = lane_index();
    const int half = lane % 2;  // of the rows that this lane gathers
    const int column = n + lane % 4 / 2 * 8 + lane / 4;
    const bool mine = half == 0 ? has[0] : has[1];
    uint16_t* const to = at<uint16_t>(row + 8 * half, column);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at_sum = 4 * (j + i / 2) + 2 * (i % 2);
        words[i] = ptx::transpose_8x8(Numeric::pack(sums[at_sum], sums[at_sum + 1]));
      }
      transpose_quad(words);
      if (mine && n + 8 * (j + lane % 4 / 2) < params.n) {
        *reinterpret_cast<uint4*>(to + int64_t{8 * j} * params.n_stride) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

}  // namespace flashmoe::moe::sm90_backward
