// Stores a consumer's sums to a gradient in the caller's layout: 16 bits or fp32, with either
// stride 1, written or accumulated.
#pragma once

#include "cuda/moe/sm90_backward/params.h"
#include "cuda/moe/sm90_backward/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90_backward {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

// Transposes a 4 x 4 matrix of words. Each of four neighbouring lanes has a row.
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

// Stores 64 rows by 2 kSums columns of a tile, from (m, n) on. Extents are multiples of 8, so a
// block of 8 by 8 elements lies within them or beyond. A thread's sums[4 j + e] is row 16 w + g + 8
// (e / 2) and column 8 j + 2 t + e % 2, with its warp w, g = lane / 4 and t = lane % 4.
template <class Element, int kSums>
struct TileStore {
  using Numeric = numeric::ElementTraits<Element>;
  static constexpr int kBlocks = kSums / 4;  // blocks of 8 columns
  static constexpr int kBatch = 8;           // blocks whose loads are in flight together

  const Job& job;
  int expert;
  int m;
  int n;

  __device__ __forceinline__ int64_t place(int row, int column) const {
    return expert * job.expert_stride + row * job.m_stride + column * job.n_stride;
  }
  template <class T>
  __device__ __forceinline__ T* at(int row, int column) const {
    return static_cast<T*>(job.out) + place(row, column);
  }

  __device__ __forceinline__ void run(float (&sums)[kSums]) const {
    const int row = m + warp_of_group() * 16;
    const bool has[2] = {row < job.m, row + 8 < job.m};
    if (!has[0]) return;
    if (job.is_fp32 != 0) {
      if (job.n_stride == 1) {
        store_pairs(sums, row, has);
      } else {
        store_each(sums, row, has);
      }
      return;
    }
    if (job.accumulate != 0) add_old(sums, row, has);
    if (job.n_stride == 1) {
      store_rows(sums, row, has);
    } else {
      store_columns(sums, row, has);
    }
  }

  // For fp32 with contiguous columns.
  __device__ __forceinline__ void store_pairs(const float (&sums)[kSums], int row,
                                              const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has[half]) continue;
      float* const to = at<float>(row + 8 * half + lane / 4, n + lane % 4 * 2);
#pragma unroll
      for (int first = 0; first < kBlocks; first += kBatch) {
        float2 old[kBatch] = {};
        if (job.accumulate != 0) {
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            const bool inside = n + 8 * (first + j) < job.n;
            if (inside) old[j] = *reinterpret_cast<const float2*>(to + 8 * (first + j));
          }
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int at_sum = 4 * (first + j) + 2 * half;
          if (n + 8 * (first + j) < job.n) {
            *reinterpret_cast<float2*>(to + 8 * (first + j)) =
                float2{sums[at_sum] + old[j].x, sums[at_sum + 1] + old[j].y};
          }
        }
      }
    }
  }

  // For fp32 with contiguous rows: eight lanes have consecutive elements of a column.
  __device__ __forceinline__ void store_each(const float (&sums)[kSums], int row,
                                             const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (n + 8 * j >= job.n) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has[e / 2]) continue;
        float* const to = at<float>(row + 8 * (e / 2) + lane / 4, n + 8 * j + lane % 4 * 2 + e % 2);
        *to = job.accumulate != 0 ? *to + sums[4 * j + e] : sums[4 * j + e];
      }
    }
  }

  // Adds the old values of a 16-bit gradient.
  __device__ __forceinline__ void add_old(float (&sums)[kSums], int row,
                                          const bool (&has)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (n + 8 * j >= job.n) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has[e / 2]) continue;
        sums[4 * j + e] += Numeric::to_float(
            *at<uint16_t>(row + 8 * (e / 2) + lane / 4, n + 8 * j + lane % 4 * 2 + e % 2));
      }
    }
  }

  // For 16 bits with contiguous columns: a lane gathers 8 elements of a row, and four lanes have
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
        if (n + 8 * (j + lane % 4) < job.n) {
          *reinterpret_cast<uint4*>(to + 8 * j) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // For 16 bits with contiguous rows: a lane gathers 8 elements of a column.
  __device__ __forceinline__ void store_columns(const float (&sums)[kSums], int row,
                                                const bool (&has)[2]) const {
    const int lane = lane_index();
    const int half = lane % 2;  // half of the rows that this lane gathers
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
      if (mine && n + 8 * (j + lane % 4 / 2) < job.n) {
        *reinterpret_cast<uint4*>(to + int64_t{8 * j} * job.n_stride) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

// Writes 16-bit gradients as boxes of 64 by 64 in shared memory. The copy engine stores them from
// there, clipped to the gradient's extents. All threads of a consumer call it.
template <class Traits>
struct BoxStore {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  static constexpr int kSums = Traits::kTileN / 2;
  static constexpr int kBox = Traits::kOutBox;
  static constexpr int kRowBytes = kBox * 2;
  static constexpr int kPairs = kBox / 16;  // pairs of blocks of 8 columns: one stmatrix each

  const Job& job;
  int expert;
  int m;
  int n;
  uint32_t buffer;
  int barrier;

  static __device__ __forceinline__ bool is_leader() {
    return thread_index() % kThreadsPerGroup == 0;
  }

  __device__ __forceinline__ void run(const float (&sums)[kSums]) const {
    if (job.n_stride == 1) {
      store<false>(sums);
    } else {
      store<true>(sums);
    }
  }

  // Call it before the kernel ends.
  static __device__ __forceinline__ void finish() {
    if (is_leader()) ptx::tma_store_wait();
    __syncwarp();
  }

 private:
  // kTurned: m is the contiguous dimension.
  template <bool kTurned>
  __device__ __forceinline__ void store(const float (&sums)[kSums]) const {
    const int lane = lane_index();
    const int warp = warp_of_group();
    const int matrix_row = lane % 8;
    // A lane gives the address of a row of one of four 8 by 8 matrices. In a box of [m][n] they are
    // rows 0 to 7 and 8 to 15 of the warp, then the next 8 columns; a box of [n][m] has the mirror
    // image.
    const uint32_t own_rows = warp * 16 + lane / 8 % 2 * 8 + matrix_row;
    const uint32_t turned =
        (lane / 16 * 8 + matrix_row) * kRowBytes + (((2 * warp + lane / 8 % 2) ^ matrix_row) * 16);
#pragma unroll
    for (int part = 0; part < Traits::kTileN / (Traits::kOutBoxes * kBox); ++part) {
      if (is_leader()) ptx::tma_store_wait_read();
      ptx::named_barrier_sync(barrier, kThreadsPerGroup);
#pragma unroll
      for (int box = 0; box < Traits::kOutBoxes; ++box) {
        const uint32_t to = buffer + box * Traits::kOutBoxBytes;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int first = 4 * ((part * Traits::kOutBoxes + box) * (kBox / 8) + 2 * i);
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            packed[j] = Numeric::pack(sums[first + 2 * j], sums[first + 2 * j + 1]);
          }
          if constexpr (kTurned) {
            ptx::stmatrix_x4_trans(to + turned + i * 16 * kRowBytes, packed[0], packed[1],
                                   packed[2], packed[3]);
          } else {
            const uint32_t chunk = 2 * i + lane / 16;
            ptx::stmatrix_x4(to + own_rows * kRowBytes + (chunk ^ matrix_row) * 16, packed[0],
                             packed[1], packed[2], packed[3]);
          }
        }
      }
      ptx::named_barrier_sync(barrier, kThreadsPerGroup);
      if (is_leader()) {
        ptx::fence_proxy_async_shared();  // once, for the stores of all threads
        send<kTurned>(n + part * Traits::kOutBoxes * kBox);
        ptx::tma_store_commit();
      }
    }
  }

  template <bool kTurned>
  __device__ __forceinline__ void send(int column) const {
    if (m >= job.m) return;
#pragma unroll
    for (int box = 0; box < Traits::kOutBoxes; ++box, column += kBox) {
      if (column >= job.n) return;
      ptx::tma_store(&job.boxes, buffer + box * Traits::kOutBoxBytes, kTurned ? m : column,
                     kTurned ? column : m, expert, 0);
    }
  }
};

}  // namespace flashmoe::moe::sm90_backward
