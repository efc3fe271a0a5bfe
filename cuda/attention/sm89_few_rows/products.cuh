// Both products of a step of one warp, with the softmax between them, on fragments that go from
// global memory straight to registers.
//
// Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that keys and output columns
// take the 16 rows of m16n8k16 and query rows its 8 columns: few rows are what there is. A lane of
// a warp, with g = lane / 4 and t = lane % 4, holds
//
//   scores[m][n][2h + e]   of key 16m + 8h + g and row 8n + 2t + e,
//   out[n][4c + j][2h + e] of column 64c + 8g + 2j + h and row 8n + 2t + e.
//
// A contraction may take its index in any order, if both operands agree. So a lane loads 16 bytes
// at a time: of key g (and g + 8, ...) the elements [8t, 8t + 8) of every 32, whose first four are
// its part of one k16 step and whose last four of the next; of Q the same; of keys 2t, 2t + 1, 2t +
// 8 and 2t + 9 of V the columns [8g, 8g + 8) of every 64, of which two go to each of four m16
// blocks. Nothing is left to do but to pair two keys of V in a register, and to transpose P
// (movmatrix).
#pragma once

#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/attention/sm89_few_rows/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe::sm89_few_rows {

template <class Traits>
using KFragments = uint32_t[Traits::kStepKeys / 8][Traits::kKChunks][4];  // of keys 8i + g
template <class Traits>
using VFragments = uint32_t[Traits::kStepKeys / 4][Traits::kVChunks][4];  // of keys v_key(i) + 2t
template <class Traits>
using QFragments =
    uint32_t[Traits::kQueriesInRegisters ? Traits::kRowBlocks : 1][Traits::kKChunks][4];
template <class Traits>
using Scores = float[Traits::kKeyBlocks][Traits::kRowBlocks][4];
template <class Traits>
using Probabilities = uint32_t[Traits::kKeyBlocks][Traits::kRowBlocks][2];
template <class Traits>
using Accumulators = float[Traits::kRowBlocks][Traits::kDimV / 16][4];

__device__ __forceinline__ constexpr int v_key(int i) {
  return 16 * (i / 4) + 8 * (i / 2 % 2) + i % 2;
}

// Loads this lane's part of one step. `k` is at the step's key g and element 8t; `keys` are left
// from the step's first on, those past them become zero.
template <class Traits>
__device__ __forceinline__ void load_k(KFragments<Traits>& fragments, const uint16_t* k,
                                       int64_t stride, int keys, int dim) {
  if (keys >= Traits::kStepKeys && dim == Traits::kDim) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        ptx::load_streaming(fragments[i][c], k + 8 * i * stride + 32 * c);
      }
    }
  } else {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        const bool valid = 8 * i + lane / 4 < keys && 32 * c + 8 * (lane % 4) < dim;
        ptx::load_streaming_or_zero(fragments[i][c], k + 8 * i * stride + 32 * c, valid);
      }
    }
  }
}

// `v` is at the step's key 2t and column 8g.
template <class Traits>
__device__ __forceinline__ void load_v(VFragments<Traits>& fragments, const uint16_t* v,
                                       int64_t stride, int keys, int dim_v) {
  if (keys >= Traits::kStepKeys && dim_v == Traits::kDimV) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kVChunks; ++c) {
        ptx::load_streaming(fragments[i][c], v + v_key(i) * stride + 64 * c);
      }
    }
  } else {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
#pragma unroll
      for (int c = 0; c < Traits::kVChunks; ++c) {
        const bool valid = v_key(i) + 2 * (lane % 4) < keys && 64 * c + 8 * (lane / 4) < dim_v;
        ptx::load_streaming_or_zero(fragments[i][c], v + v_key(i) * stride + 64 * c, valid);
      }
    }
  }
}

// This lane's chunks of row 8n + g, zeros where there is no such row.
template <class Traits>
__device__ __forceinline__ void load_q_block(uint32_t (&fragments)[Traits::kKChunks][4],
                                             const Params& params, const Tile& tile, int n) {
  const int lane = lane_index();
  const int row = 8 * n + lane / 4;
  const uint16_t* q = params.tensors.q +
                      Row::of(params, tile, row).offset(params.tensors.q_strides, tile.batch) +
                      8 * (lane % 4);
#pragma unroll
  for (int c = 0; c < Traits::kKChunks; ++c) {
    ptx::load_or_zero(fragments[c], q + 32 * c,
                      row < tile.rows && 32 * c + 8 * (lane % 4) < params.tensors.dim);
  }
}

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

// Hides the keys that a row does not see. `first_key` is the step's.
template <class Traits>
__device__ __forceinline__ void mask_scores(Scores<Traits>& scores, const Params& params,
                                            const Tile& tile, const Shared<Traits>& shared,
                                            int first_key) {
  const int lane = lane_index();
  const int key = first_key + lane / 4;
#pragma unroll
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      Keys keys = {0, sequence_of(params, tile.batch).length_k};
      if (params.score.masked) keys = shared.keys()[8 * n + 2 * (lane % 4) + e];
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
        if (key + 8 * i < keys.first || key + 8 * i >= keys.end) {
          scores[i / 2][n][i % 2 * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

// Online softmax of the rows of a tile over the keys of one warp.
template <class Traits>
struct RowStatistics {
  float sum[Traits::kRowBlocks][2];      // of this lane's keys; row 8n + 2t + e
  float row_max[Traits::kRowBlocks][2];  // log2

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[n][e] = 0.0f;
        row_max[n][e] = kNoRowMax;
      }
    }
  }

  // Raises the row maxima that the scores have outgrown, and rescales what was added up under them.
  __device__ __forceinline__ void rescale(const Scores<Traits>& scores, float scale_log2,
                                          Accumulators<Traits>& out) {
    float highest[Traits::kRowBlocks][2];
    bool outgrown = false;
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(scores[0][n][e], scores[0][n][2 + e]);
#pragma unroll
        for (int m = 1; m < Traits::kKeyBlocks; ++m) {
          top = fmaxf(top, fmaxf(scores[m][n][e], scores[m][n][2 + e]));
        }
        highest[n][e] = top;
        outgrown = outgrown || excess(top, scale_log2, row_max[n][e]) > kLazyBits;
      }
    }
    if (!__any_sync(kFullWarp, outgrown)) return;
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = highest[n][e];
#pragma unroll
        for (int mask = 4; mask < kThreadsPerWarp; mask *= 2) {  // lanes of the same rows
          top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, mask));
        }
        const float factor = rescale_row(top, scale_log2, row_max[n][e], sum[n][e]);
#pragma unroll
        for (int j = 0; j < Traits::kDimV / 16; ++j) {
          out[n][j][e] *= factor;
          out[n][j][2 + e] *= factor;
        }
      }
    }
  }

  // p = 2^(scores * scale_log2 - row_max), rounded, as B fragments.
  __device__ __forceinline__ void exponentiate(Probabilities<Traits>& p,
                                               const Scores<Traits>& scores, float scale_log2) {
    exponentiate(p, scores, scale_log2, [](int, float weight) { return weight; });
  }
  // The same, with what `of_values(i, p)` makes of those of keys 8i + g before they are rounded.
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
            row[e] = probability(scores[m][n][2 * h + e], scale_log2, row_max[n][e]);
            sum[n][e] += row[e];
            row[e] = of_values(2 * m + h, row[e]);
          }
          p[m][n][h] = ptx::transpose_8x8(
              numeric::ElementTraits<typename Traits::Element>::pack(row[0], row[1]));
        }
      }
    }
  }
};

}  // namespace flashmoe::sm89_few_rows
