// Stores a consumer's sums to a gradient in the caller's layout: 16 bits or fp32, with either
// stride 1, written or accumulated.
#pragma once

#include "cuda/moe/sm90_backward/params.h"
#include "cuda/moe/sm90_backward/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm90_backward {

using reread::lane_index;
using reread::thread_index;
using reread::warp_of_group;

// Stores 64 rows by kColumns columns of a tile, from (m, n) on, that the copy engine cannot: fp32,
// or accumulated. All threads of a consumer call it. They leave 64 columns at a time in `buffer`,
// line by line of the gradient's contiguous dimension, and then handle pieces of 16 bytes of these
// lines. Extents are multiples of 8, so a piece lies within them or beyond. A thread's sums[4 j +
// e] is row 16 w + g + 8 (e / 2) and column 8 j + 2 t + e % 2, with its warp w, g = lane / 4 and t
// = lane % 4.
template <class Traits, int kColumns>
struct LineStore {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  static constexpr int kSums = kColumns / 2;
  static constexpr int kLines = 64;
  static constexpr int kBlocks = kLines / 8;  // of 8 columns
  static constexpr int kBatch = 2;            // pieces whose loads are in flight together
  static constexpr uint32_t kLineBytes = 68 * sizeof(float);  // at most two lanes to a bank
  static_assert(kLines * kLineBytes <= Traits::kOutBoxes * Traits::kOutBoxBytes);

  const Job& job;
  int expert;
  int m;
  int n;
  uint32_t buffer;
  int barrier;

  __device__ __forceinline__ void run(const float (&sums)[kSums]) const {
    // The engine may read boxes of a tile before from the buffer.
    if (thread_index() % kThreadsPerGroup == 0) ptx::tma_store_wait_read();
#pragma unroll
    for (int first = 0; first < kColumns; first += kLines) {
      ptx::named_barrier_sync(barrier, kThreadsPerGroup);
      if (turned()) {
        leave<true>(sums, first / 8);
      } else {
        leave<false>(sums, first / 8);
      }
      ptx::named_barrier_sync(barrier, kThreadsPerGroup);
      if (job.is_fp32 != 0) {
        write<float>(n + first);
      } else {
        write<uint16_t>(n + first);
      }
    }
  }

 private:
  // Whether columns are lines.
  __device__ __forceinline__ bool turned() const { return job.n_stride != 1; }

  // Leaves 64 columns, from a block of 8 on.
  template <bool kTurned>
  __device__ __forceinline__ void leave(const float (&sums)[kSums], int first_block) const {
    constexpr uint32_t kRowBytes = kTurned ? sizeof(float) : kLineBytes;
    constexpr uint32_t kColumnBytes = kTurned ? kLineBytes : sizeof(float);
    const int lane = lane_index();
    const int row = warp_of_group() * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const uint32_t own = buffer + row * kRowBytes + column * kColumnBytes;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const uint32_t to = own + i % 4 / 2 * 8 * kRowBytes + (i / 4 * 8 + i % 2) * kColumnBytes;
      ptx::store_shared(to, sums[4 * first_block + i]);
    }
  }

  // Writes the lines that were left, or adds them to the gradient.
  template <class T>
  __device__ __forceinline__ void write(int first_column) const {
    constexpr int kPiece = 16 / sizeof(T);
    constexpr int kPieces = kLines / kPiece;  // of a line
    constexpr int kLinesApart = kThreadsPerGroup / kPieces;
    const int thread = thread_index() % kThreadsPerGroup;
    const int at = thread % kPieces * kPiece;
    const int first_line = thread / kPieces;
    const int lines = turned() ? job.n - first_column : job.m - m;
    if (at >= (turned() ? job.m - m : job.n - first_column)) return;
    const int64_t stride = turned() ? job.n_stride : job.m_stride;
    T* to = static_cast<T*>(job.out) + expert * job.expert_stride + m * job.m_stride +
            first_column * job.n_stride + first_line * stride + at;
    uint32_t from = buffer + first_line * kLineBytes + at * sizeof(float);
#pragma unroll 1
    for (int line = first_line; line < kLines; line += kBatch * kLinesApart) {
      uint4 held[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool adds = job.accumulate != 0 && line + i * kLinesApart < lines;
        if (adds) held[i] = *reinterpret_cast<const uint4*>(to + i * kLinesApart * stride);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float4 low = ptx::load_shared_float4(from + i * kLinesApart * kLineBytes);
        uint4 piece = {};
        if constexpr (sizeof(T) == sizeof(float)) {
          piece = added(held[i], low);
        } else {
          piece = added(held[i], low,
                        ptx::load_shared_float4(from + i * kLinesApart * kLineBytes + 16));
        }
        if (line + i * kLinesApart < lines) {
          *reinterpret_cast<uint4*>(to + i * kLinesApart * stride) = piece;
        }
      }
      to += kBatch * kLinesApart * stride;
      from += kBatch * kLinesApart * kLineBytes;
    }
  }

  __device__ __forceinline__ float added(float held, float sum) const {
    return job.accumulate != 0 ? held + sum : sum;
  }
  __device__ __forceinline__ uint4 added(const uint4& held, const float4& sum) const {
    return make_uint4(__float_as_uint(added(__uint_as_float(held.x), sum.x)),
                      __float_as_uint(added(__uint_as_float(held.y), sum.y)),
                      __float_as_uint(added(__uint_as_float(held.z), sum.z)),
                      __float_as_uint(added(__uint_as_float(held.w), sum.w)));
  }
  __device__ __forceinline__ uint32_t added(uint32_t held, float low, float high) const {
    const float2 pair = Numeric::unpack(held);
    return Numeric::pack(added(pair.x, low), added(pair.y, high));
  }
  __device__ __forceinline__ uint4 added(const uint4& held, const float4& low,
                                         const float4& high) const {
    return make_uint4(added(held.x, low.x, low.y), added(held.y, low.z, low.w),
                      added(held.z, high.x, high.y), added(held.w, high.z, high.w));
  }
};

// Writes 16-bit gradients as boxes of 64 by 64 in shared memory. The copy engine stores them from
// there, clipped to the gradient's extents. All threads of a consumer call it.
template <class Traits, int kColumns>
struct BoxStore {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  static constexpr int kSums = kColumns / 2;
  static constexpr int kBox = Traits::kOutBox;
  static constexpr int kBoxes = kColumns / kBox;
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

  __device__ __forceinline__ void run(float (&sums)[kSums]) const {
    if (job.n_stride == 1) {
      store<false>(sums);
    } else {
      store<true>(sums);
    }
  }

 private:
  // kTurned: m is the contiguous dimension.
  template <bool kTurned>
  __device__ __forceinline__ void store(float (&sums)[kSums]) const {
    ptx::pin(sums);
    const int lane = lane_index();
    const int warp = warp_of_group();
    const int matrix_row = lane % 8;
    // A lane gives the address of a row of one of four 8 by 8 matrices. In a box of [m][n] they are
    // rows 0 to 7 and 8 to 15 of the warp, then the next 8 columns; a box of [n][m] has the mirror
    // image.
    const uint32_t own_rows = warp * 16 + lane / 8 % 2 * 8 + matrix_row;
    const uint32_t turned =
        (lane / 16 * 8 + matrix_row) * kRowBytes + (((2 * warp + lane / 8 % 2) ^ matrix_row) * 16);
    if (is_leader()) ptx::tma_store_wait_read();
    ptx::named_barrier_sync(barrier, kThreadsPerGroup);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t to = buffer + box * Traits::kOutBoxBytes;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int first = 4 * (box * (kBox / 8) + 2 * i);
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          packed[j] = Numeric::pack(sums[first + 2 * j], sums[first + 2 * j + 1]);
        }
        if constexpr (kTurned) {
          ptx::stmatrix_x4_trans(to + turned + i * 16 * kRowBytes, packed[0], packed[1], packed[2],
                                 packed[3]);
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
      send<kTurned>(n);
      ptx::tma_store_commit();
    }
  }

  template <bool kTurned>
  __device__ __forceinline__ void send(int column) const {
    if (m >= job.m) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box, column += kBox) {
      if (column >= job.n) return;
      ptx::tma_store(&job.boxes, buffer + box * Traits::kOutBoxBytes, kTurned ? m : column,
                     kTurned ? column : m, expert, 0);
    }
  }
};

}  // namespace flashmoe::moe::sm90_backward
