// The epilogue, from accumulators to rows of the output: weights of pairs, biases, the activation,
// transposition and stores.
//
// A thread's accumulators are of two neighbouring tokens and of rows g and g + 8 of a fragment, g =
// lane / 4: a gate and an up of the same output. The results are packed in pairs of tokens and
// transposed by movmatrix. They are then of one token and two neighbouring rows of each of four
// blocks. If columns of the weights are contiguous, these eight are neighbours in memory because of
// the order of the rows in the tile; with transposed weights four lanes exchange them.
#pragma once

#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/schedule.cuh"
#include "cuda/moe/sm89/tiles.cuh"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/transpose.cuh"

namespace flashmoe::moe::sm89 {

inline constexpr int kBlocks = 4;  // blocks of 8 rows of which a thread has pairs

template <class Traits>
class Epilogue {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  static constexpr int kGroups = Traits::kGated ? 1 : 2;  // groups of 32 output rows, per warp
  static constexpr int kTerms = 2 * Traits::kRowFragments;

 public:
  __device__ __forceinline__ Epilogue(const Params& params, const Tile& tile, int warp_m)
      : params_(params),
        tile_(tile),
        lane_(lane_index()),
        interleaved_(Traits::kGated && Traits::kTransposed && params.interleaved),
        first_(tile.weight_tile * Traits::kOutRows + warp_m * Traits::kWarpOutRows) {}

  // Stores all accumulators of a warp. Its first token is `token` of the tile.
  template <int kTokenFragments>
  __device__ __forceinline__ void store_all(float (&d)[kTokenFragments][Traits::kRowFragments][4],
                                            int token) {
    if (is_bare()) {
#pragma unroll
      for (int n = 0; n < kTokenFragments; ++n) store_bare(d[n], token + 8 * n);
      return;
    }
    read_biases();
    // There is one copy of the code, and the accumulators move past it: the fetch of a copy for
    // each of them would take longer than running it.
#pragma unroll 1
    for (int n = 0; n < kTokenFragments; ++n) {
      store(d[0], token + 8 * n);
#pragma unroll
      for (int i = 0; i + 1 < kTokenFragments; ++i) {
#pragma unroll
        for (int m = 0; m < Traits::kRowFragments; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) d[i][m][e] = d[i + 1][m][e];
        }
      }
    }
  }

 private:
  // Whether this is the common case: SwiGLU or nothing, on the products as they are.
  __device__ __forceinline__ bool is_bare() const {
    const bool plain = params_.pair_weights == nullptr && params_.pre_activation == nullptr &&
                       params_.bias[0].data == nullptr && params_.bias[1].data == nullptr;
    if constexpr (Traits::kGated) {
      return plain && params_.activation == FLASHMOE_ACTIVATION_SILU &&
             params_.limit == __int_as_float(0x7f800000) && params_.up_offset == 0.0f;
    } else {
      return plain && params_.activation == kNoActivation && params_.out_is_fp32 == 0 &&
             params_.adds == 0;
    }
  }

  __device__ __forceinline__ void store_bare(const float (&d)[Traits::kRowFragments][4],
                                             int token) const {
    const int row = token + lane_ / 4;
    const bool stores = row < tile_.rows;
    if constexpr (Traits::kGated) {
      uint32_t words[kBlocks];
#pragma unroll
      for (int m = 0; m < Traits::kRowFragments; ++m) {
        float value[2][2] = {{d[m][0], d[m][1]}, {d[m][2], d[m][3]}};
        if (interleaved_) pair_up(value);
        const float slope = params_.alpha * kLog2E;
        words[m] = Numeric::pack(times_sigmoid(value[0][0], value[0][0] * slope) * value[1][0],
                                 times_sigmoid(value[0][1], value[0][1] * slope) * value[1][1]);
      }
      store_words(words, out_row(row), 0, stores);
    } else {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint32_t words[kBlocks];
#pragma unroll
        for (int f = 0; f < kBlocks; ++f) {
          const auto& pairs = d[2 * group + f / 2];
          words[f] = Numeric::pack(pairs[f % 2 * 2], pairs[f % 2 * 2 + 1]);
        }
        store_words(words, out_row(row), group, stores);
      }
    }
  }

  // Stores the accumulators of eight tokens from `token` of the tile on.
  __device__ __forceinline__ void store(const float (&d)[Traits::kRowFragments][4], int token) {
    float factor[2] = {1.0f, 1.0f};
    if (params_.pair_weights != nullptr) {
#pragma unroll
      for (int e = 0; e < 2; ++e) factor[e] = pair_weight(token + 2 * (lane_ % 4) + e);
    }
    // [0]: results, or the gate that they are computed from; [1]: the up.
    float z[2][Traits::kRowFragments][2];  // [half][fragment][token]
#pragma unroll
    for (int m = 0; m < Traits::kRowFragments; ++m) {
      float value[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i / 2][i % 2] = d[m][i] * factor[i % 2];
      if (interleaved_) pair_up(value);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i / 2][m][i % 2] = value[i / 2][i % 2] + bias_[2 * m + i / 2];
    }
    const int row = token + lane_ / 4;
    const bool stores = row < tile_.rows;
    if (params_.pre_activation != nullptr) store_pre_activation(z, row, stores);
    if constexpr (Traits::kGated) {
      float act[2 * Traits::kRowFragments];
#pragma unroll
      for (int i = 0; i < 2 * Traits::kRowFragments; ++i) {
        act[i] = cut_above(z[0][i / 2][i % 2], params_.limit);
      }
      activate(act, params_.activation, params_.alpha);
      uint32_t words[kBlocks];
#pragma unroll
      for (int m = 0; m < Traits::kRowFragments; ++m) {
        float out[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float up = cut(z[1][m][e], params_.limit);
          out[e] = act[2 * m + e] * (up + params_.up_offset);
        }
        words[m] = Numeric::pack(out[0], out[1]);
      }
      store_words(words, out_row(row), 0, stores);
    } else {
      if (params_.activation != kNoActivation) {
        float act[4 * Traits::kRowFragments];
#pragma unroll
        for (int i = 0; i < 4 * Traits::kRowFragments; ++i) {
          act[i] = cut(z[i % 4 / 2][i / 4][i % 2], params_.limit);
        }
        activate(act, params_.activation, params_.alpha);
#pragma unroll
        for (int i = 0; i < 4 * Traits::kRowFragments; ++i) z[i % 4 / 2][i / 4][i % 2] = act[i];
      }
      if (params_.out_is_fp32 != 0 || params_.adds != 0) {
        store_or_add(z, token);
      } else {
        store_plain(z, out_row(row), stores);
      }
    }
  }

  // For fp32 or accumulated outputs: stores element by element in the order of the accumulators.
  __device__ __forceinline__ void store_or_add(const float (&z)[2][Traits::kRowFragments][2],
                                               int token) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = token + 2 * (lane_ % 4) + e;
      if (row >= tile_.rows) continue;
      const int64_t begin =
          tile_.expert * params_.out_expert_stride + (tile_.first_row + row) * params_.out_stride;
#pragma unroll
      for (int i = 0; i < 2 * Traits::kRowFragments; ++i) {
        const int column = first_ + row_of(i / 2, i % 2);
        if (column >= params_.out_columns) continue;
        float sum = z[i % 2][i / 2][e];
        if (params_.out_is_fp32 != 0) {
          float* const to = reinterpret_cast<float*>(params_.out) + begin + column;
          if (params_.adds != 0) sum += *to;
          *to = sum;
        } else {
          uint16_t* const to = params_.out + begin + column;
          *to = static_cast<uint16_t>(Numeric::pack(sum + Numeric::to_float(*to), 0.0f));
        }
      }
    }
  }

  // The row of the output, counted from first_, of a fragment's accumulators d[2 half] and d[2 half
  // + 1].
  __device__ __forceinline__ int row_of(int fragment, int half) const {
    const int g = lane_ / 4;
    if constexpr (Traits::kGated) {
      if (!Traits::kTransposed) return 8 * (g / 2) + 2 * fragment + g % 2;
      return 8 * fragment + (interleaved_ ? g % 2 * 4 + g / 2 : g);
    } else {
      const int block = 2 * fragment + half;
      if (!Traits::kTransposed) return block / 4 * 32 + 8 * (g / 2) + 2 * (block % 4) + g % 2;
      return 8 * block + g;
    }
  }

  __device__ __forceinline__ float read_bias(int fragment, int half) const {
    const Bias& bias = params_.bias[Traits::kGated ? half : 0];
    const int row = first_ + row_of(fragment, half);
    if (bias.data == nullptr || row >= params_.out_columns) return 0.0f;
    return load_bias<Element>(bias, tile_.expert, row);
  }

  __device__ __forceinline__ void read_biases() {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) bias_[i] = read_bias(i / 2, i % 2);
  }

  __device__ __forceinline__ int pair_of(int row) const {
    if (row >= tile_.rows) return -1;
    const int pair = params_.pairs[tile_.first_row + row];
    return pair < params_.rows ? pair : -1;
  }

  __device__ __forceinline__ float pair_weight(int row) const {
    const int pair = pair_of(row);
    return pair >= 0 ? params_.pair_weights[pair] : 0.0f;
  }

  // Columns of an interleaved tile alternate: lanes of even g have two gates, those of odd g two
  // ups. Each lane passes one on.
  __device__ __forceinline__ void pair_up(float (&value)[2][2]) const {
    const bool odd = lane_ / 4 % 2 != 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float received = __shfl_xor_sync(kFullWarp, odd ? value[0][e] : value[1][e], 4);
      (odd ? value[0][e] : value[1][e]) = received;
    }
  }

  __device__ __forceinline__ uint16_t* out_row(int row) const {
    return params_.out + tile_.expert * params_.out_expert_stride +
           (tile_.first_row + row) * params_.out_stride;
  }

  // Stores 32 rows of one token, from row 32 * `group` on.
  __device__ __forceinline__ void store_words(uint32_t (&words)[kBlocks], uint16_t* out, int group,
                                              bool stores) const {
#pragma unroll
    for (int f = 0; f < kBlocks; ++f) words[f] = ptx::transpose_8x8(words[f]);
    if constexpr (Traits::kTransposed) {
      transpose_4x4(words, lane_);
      if (interleaved_) {
        // Word t has rows t and 4 + t of this lane's eight.
        const uint32_t low[2] = {__byte_perm(words[0], words[1], 0x5410),
                                 __byte_perm(words[2], words[3], 0x5410)};
        words[3] = __byte_perm(words[2], words[3], 0x7632);
        words[2] = __byte_perm(words[0], words[1], 0x7632);
        words[0] = low[0];
        words[1] = low[1];
      }
    }
    const int row = first_ + 32 * group + 8 * (lane_ % 4);
    if (stores && row < params_.out_columns) {
      *reinterpret_cast<uint4*>(out + row) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ void store_plain(const float (&z)[2][Traits::kRowFragments][2],
                                              uint16_t* out, bool stores) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t words[kBlocks];
#pragma unroll
      for (int f = 0; f < kBlocks; ++f) {
        const auto& pair = z[f % 2][2 * group + f / 2];
        words[f] = Numeric::pack(pair[0], pair[1]);
      }
      store_words(words, out, group, stores);
    }
  }

  __device__ __forceinline__ void store_pre_activation(
      const float (&z)[2][Traits::kRowFragments][2], int row, bool stores) const {
    stores = stores && (params_.pairs == nullptr || pair_of(row) >= 0);
    uint16_t* out =
        params_.pre_activation + (tile_.first_row + row) * params_.pre_activation_stride;
    if constexpr (Traits::kGated) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[kBlocks];
#pragma unroll
        for (int m = 0; m < Traits::kRowFragments; ++m) {
          words[m] = Numeric::pack(z[half][m][0], z[half][m][1]);
        }
        store_words(words, out + half * params_.out_columns, 0, stores);
      }
    } else {
      store_plain(z, out, stores);
    }
  }

  const Params& params_;
  const Tile& tile_;
  int lane_;
  bool interleaved_;
  int first_;  // the warp's first row of the output
  float bias_[kTerms];
};

}  // namespace flashmoe::moe::sm89
