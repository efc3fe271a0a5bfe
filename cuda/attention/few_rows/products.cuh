// Both products of a warp's step, with the softmax between them, on fragments that go from global
// memory directly to registers.
//
// Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T. Keys and output columns then take
// the 16 rows of m16n8k16, and query rows its 8 columns: query rows are few. A lane of a warp, with
// g = lane / 4 and t = lane % 4, holds
//
//   scores[m][n][2h + e]   of key 16m + 8h + g and row 8n + 2t + e,
//   out[n][4c + j][2h + e] of column 64c + 8g + 2j + h and row 8n + 2t + e.
//
// A contraction may take its index in any order if both operands agree. So a lane loads 16 bytes at
// a time. For key g (and g + 8, ...) it loads the elements [8t, 8t + 8) of every 32: the first four
// are its part of one k16 step, the last four of the next. It loads Q in the same way. For keys 2t,
// 2t + 1, 2t + 8 and 2t + 9 of V it loads the columns [8g, 8g + 8) of every 64: two go to each of
// four m16 blocks. The only work left is to pair two keys of V in a register, and to transpose P
// (movmatrix).
#pragma once

#include "cuda/attention/few_rows/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/tile/row_statistics.cuh"

namespace flashmoe::few_rows {

template <class Traits>
using KFragments = uint32_t[Traits::kStepKeys / 8][Traits::kKChunks][4];  // of keys 8i + g
template <class Traits>
using VFragments = uint32_t[Traits::kStepKeys / 4][Traits::kVChunks][4];  // of keys v_key(i) + 2t
template <class Traits>
using QFragments =
    uint32_t[Traits::kQueriesInRegisters ? Traits::kRowBlocks : 1][Traits::kKChunks][4];
template <class Traits>
using Fragments = TransposedScoreFragments<Traits::kRowBlocks, Traits::kKeyBlocks>;
template <class Traits>
using Scores = typename Fragments<Traits>::Scores;
template <class Traits>
using Probabilities = uint32_t[Traits::kKeyBlocks][Traits::kRowBlocks][2];
template <class Traits>
using Accumulators = float[Traits::kRowBlocks][Traits::kDimV / 16][4];

__device__ __forceinline__ constexpr int v_key(int i) {
  return 16 * (i / 4) + 8 * (i / 2 % 2) + i % 2;
}

// Shared memory of a block. The queries come first.
template <class Traits>
struct Shared {
  unsigned char* base;

  __device__ __forceinline__ uint4* queries() const { return reinterpret_cast<uint4*>(base); }
  // Parts of the warps, [warps][rows][units]. `swizzle` permutes the units of a row.
  __device__ __forceinline__ float4* warp_parts() const {
    return reinterpret_cast<float4*>(base + Traits::kFixedBytes);
  }
  // Row max and sum of the parts, [warps][rows].
  __device__ __forceinline__ float2* warp_statistics() const {
    return reinterpret_cast<float2*>(base + Traits::kFixedBytes +
                                     warp_count() * Traits::kPartialBytes);
  }
};

// Chunk c of rows 8n + g of Q.
template <class Traits>
__device__ __forceinline__ void query_chunk(uint32_t (&b)[4], const QFragments<Traits>& q,
                                            const Shared<Traits>& shared, int n, int c) {
  if constexpr (Traits::kQueriesInRegisters) {
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e] = q[n][c][e];
  } else {
    const uint4 chunk =
        shared.queries()[(n * Traits::kKChunks + c) * kThreadsPerWarp + lane_index()];
    b[0] = chunk.x, b[1] = chunk.y, b[2] = chunk.z, b[3] = chunk.w;
  }
}

// scores = K Q^T
template <class Traits>
__device__ __forceinline__ void multiply_k(Scores<Traits>& scores, const KFragments<Traits>& k,
                                           const QFragments<Traits>& q,
                                           const Shared<Traits>& shared) {
#pragma unroll
  for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int c = 0; c < Traits::kKChunks; ++c) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      uint32_t b[4];
      query_chunk<Traits>(b, q, shared, n, c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < Traits::kKeyBlocks; ++m) {
          const uint32_t a[4] = {k[2 * m][c][2 * half], k[2 * m + 1][c][2 * half],
                                 k[2 * m][c][2 * half + 1], k[2 * m + 1][c][2 * half + 1]};
          ptx::mma_m16n8k16<typename Traits::Element>(scores[m][n], a, b[2 * half],
                                                      b[2 * half + 1]);
        }
      }
    }
  }
}

// out += V^T P^T
template <class Traits>
__device__ __forceinline__ void multiply_v(Accumulators<Traits>& out, const VFragments<Traits>& v,
                                           const Probabilities<Traits>& p) {
#pragma unroll
  for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
    for (int c = 0; c < Traits::kVChunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t v0 = v[4 * m][c][j];
        const uint32_t v1 = v[4 * m + 1][c][j];
        const uint32_t v8 = v[4 * m + 2][c][j];
        const uint32_t v9 = v[4 * m + 3][c][j];
        constexpr uint32_t kLow = 0x5410;
        constexpr uint32_t kHigh = 0x7632;
        const uint32_t a[4] = {__byte_perm(v0, v1, kLow), __byte_perm(v0, v1, kHigh),
                               __byte_perm(v8, v9, kLow), __byte_perm(v8, v9, kHigh)};
#pragma unroll
        for (int n = 0; n < Traits::kRowBlocks; ++n) {
          ptx::mma_m16n8k16<typename Traits::Element>(out[n][4 * c + j], a, p[m][n][0], p[m][n][1]);
        }
      }
    }
  }
}

// Online softmax of the rows of a tile over the keys of one warp.
template <class Traits>
struct Statistics : RowStatistics<Fragments<Traits>::kRows> {
  // Also rescales the accumulators.
  __device__ __forceinline__ void rescale(const Scores<Traits>& scores, float scale_log2,
                                          Accumulators<Traits>& out) {
    RowStatistics<Fragments<Traits>::kRows>::template rescale<Fragments<Traits>>(
        scores, scale_log2, [&](int r, float factor) {
#pragma unroll
          for (int j = 0; j < Traits::kDimV / 16; ++j) {
            out[r / 2][j][r % 2] *= factor;
            out[r / 2][j][2 + r % 2] *= factor;
          }
        });
  }

  // p = 2^(scores * scale_log2 - row_max), rounded, as B fragments.
  __device__ __forceinline__ void exponentiate(Probabilities<Traits>& p,
                                               const Scores<Traits>& scores, float scale_log2) {
    exponentiate(p, scores, scale_log2, [](int, float weight) { return weight; });
  }
  // The same, but of_values(i, p) changes those of keys 8i + g before they are rounded.
  template <class OfValues>
  __device__ __forceinline__ void exponentiate(Probabilities<Traits>& p,
                                               const Scores<Traits>& scores, float scale_log2,
                                               const OfValues& of_values) {
#pragma unroll
    for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float row[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            row[e] = probability(scores[m][n][2 * h + e], scale_log2, this->row_max[2 * n + e]);
            this->sum[2 * n + e] += row[e];
            row[e] = of_values(2 * m + h, row[e]);
          }
          p[m][n][h] = ptx::transpose_8x8(
              numeric::ElementTraits<typename Traits::Element>::pack(row[0], row[1]));
        }
      }
    }
  }
};

}  // namespace flashmoe::few_rows
