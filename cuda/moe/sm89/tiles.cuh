// The tiles of weights and tokens in shared memory: which thread copies what, and where fragments
// begin.
#pragma once

#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/schedule.cuh"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashmoe::moe::sm89 {

// Rows of 32 elements along K, 64 bytes. Two rows lie in the 128 bytes of one access, so the
// permutation of chunks changes every other row: any eight consecutive rows lie in distinct banks.
struct ColumnsLayout {
  static constexpr int kChunksPerRow = 4;
  static constexpr int kRowBytes = kChunksPerRow * kBytesPerChunk;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + (chunk ^ (row >> 1 & 3)) * kBytesPerChunk);
  }
};

// The transposed tile of weights: rows of 128 elements, 256 bytes, consecutive along K.
struct RowsLayout {
  static constexpr int kChunksPerRow = 16;
  static constexpr int kRowBytes = kChunksPerRow * kBytesPerChunk;

  static __device__ __forceinline__ uint32_t offset(int column, int chunk) {
    return static_cast<uint32_t>(column * kRowBytes + ((chunk ^ (column & 7)) * kBytesPerChunk));
  }
};

// Fragments have 16 rows: of one matrix, or 8 of the gate above the same 8 of the up, so that a
// thread holds both of an output. In a tile of weights with contiguous columns, the order of rows
// saves work in the epilogue. After movmatrix has transposed the accumulators, a thread has element
// pairs from four blocks of eight rows, and these pairs must be neighbours in memory. So row 2 t +
// e of block f, of four consecutive blocks, is row 8 t + 2 f + e of the output.
template <class Traits>
__host__ __device__ constexpr int out_row_of(int row) {
  const int e = row % 2;
  const int t = row / 2 % 4;
  if (Traits::kGated) {
    const int f = row / 16 % 4;
    return row / 64 * 32 + 8 * t + 2 * f + e;
  }
  const int f = row / 8 % 4;
  return row / 32 * 32 + 8 * t + 2 * f + e;
}

// Copies tiles of weights, step by step. Rows past the last are not written: they only affect
// outputs past the last.
template <class Traits>
class WeightLoader {
 public:
  __device__ __forceinline__ WeightLoader() {
    destination_ = Traits::kTransposed ? RowsLayout::offset(column(), chunk())
                                       : ColumnsLayout::offset(row(), chunk());
    pin(destination_);
  }

  __device__ __forceinline__ void begin(const Params& params, const Tile& tile) {
    const int first = tile.weight_tile * Traits::kOutRows;
    if constexpr (Traits::kTransposed) {
      // Chunks 0 to 7 of a gated tile hold the upper halves of the fragments, 8 to 15 the lower
      // ones.
      const int chunk = WeightLoader::chunk();
      const int half = Traits::kGated ? chunk / 8 : 0;
      const int out_row = first + (Traits::kGated ? chunk % 8 : chunk) * kElementsPerChunk;
      const bool interleaved = Traits::kGated && params.interleaved;
      const Weights& weights = params.weights[interleaved ? 0 : half];
      source_ = weights.data + tile.expert * weights.expert_stride + column() * weights.stride +
                (interleaved ? 2 * out_row + half * kElementsPerChunk : out_row);
      valid_ = out_row < params.out_columns ? ~0u : 0;
      stride_ = weights.stride;
    } else {
      const int row = WeightLoader::row();
      const Weights& weights = params.weights[Traits::kGated ? row / 8 % 2 : 0];
      const int out_row = first + out_row_of<Traits>(row);
      source_ =
          weights.data + tile.expert * weights.expert_stride + out_row * weights.stride + column();
      valid_ = 0;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const bool valid = out_row + out_row_of<Traits>(i * kRowsPerPass) < params.out_columns;
        valid_ |= static_cast<uint32_t>(valid) << i;
      }
      stride_ = weights.stride;
    }
  }

  // kFull: the step has all of its columns.
  template <bool kFull>
  __device__ __forceinline__ void load_next(uint32_t stage, int columns_left) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      constexpr auto strides = [](int pass) {
        return Traits::kTransposed ? pass * kColumnsPerPass
                                   : out_row_of<Traits>(pass * kRowsPerPass);
      };
      const uint32_t destination = stage + destination_ + i * kPassBytes;
      const uint16_t* source = source_ + strides(i) * stride_;
      const bool valid = valid_ >> i & 1;
      if constexpr (kFull) {
        ptx::cp_async_16_if(destination, source, valid);
      } else if (valid) {
        const int first = Traits::kTransposed ? column() + i * kColumnsPerPass : column();
        ptx::cp_async_16_or_zero(destination, source, first < columns_left);
      }
    }
    if constexpr (Traits::kTransposed) {
      source_ += Traits::kStepColumns * stride_;
    } else {
      source_ += Traits::kStepColumns;
    }
  }

 private:
  static constexpr int kColumnsPerPass = Traits::kThreads / RowsLayout::kChunksPerRow;
  static constexpr int kRowsPerPass = Traits::kThreads / ColumnsLayout::kChunksPerRow;
  static constexpr int kPassBytes = Traits::kThreads * kBytesPerChunk;
  static constexpr int kPasses = Traits::kWeightBytes / kPassBytes;
  static_assert(kColumnsPerPass % 8 == 0 && kRowsPerPass % 16 == 0, "passes are alike");
  static_assert(kPasses * kPassBytes == Traits::kWeightBytes);

  // This thread's chunk in the first pass.
  static __device__ __forceinline__ int chunk() {
    return thread_index() %
           (Traits::kTransposed ? RowsLayout::kChunksPerRow : ColumnsLayout::kChunksPerRow);
  }
  static __device__ __forceinline__ int column() {
    return Traits::kTransposed ? thread_index() / RowsLayout::kChunksPerRow
                               : chunk() * kElementsPerChunk;
  }
  static __device__ __forceinline__ int row() {
    return thread_index() / ColumnsLayout::kChunksPerRow;
  }

  const uint16_t* source_;
  int64_t stride_;
  uint32_t valid_;  // one bit per pass
  uint32_t destination_;
};

// Copies tiles of tokens, step by step. Rows past the last are not written, either.
template <class Traits>
class TokenLoader {
 public:
  __device__ __forceinline__ TokenLoader()
      : destination_(Traits::kWeightBytes + ColumnsLayout::offset(row_of(0), chunk())) {
    pin(destination_);
  }

  // Reads which rows of x the next tile has, before that tile begins.
  __device__ __forceinline__ void look_ahead(const Params& params, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row_of(i);
      next_[i] = -1;
      if (row < tile.rows) {
        next_[i] = tile.first_row + row;
        if (params.pairs != nullptr) next_[i] = params.pairs[next_[i]];
      }
    }
  }

  __device__ __forceinline__ void begin(const Params& params, const Tile& tile) {
    source_ = params.x + tile.expert * params.x_expert_stride + chunk() * kElementsPerChunk;
    const auto stride = static_cast<uint32_t>(params.x_stride / kElementsPerChunk);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool valid = next_[i] >= 0 && next_[i] < params.rows;
      const auto row = static_cast<uint32_t>(next_[i]);
      const uint32_t token =
          params.pairs != nullptr ? row / static_cast<uint32_t>(params.top_k) : row;
      offset_[i] = valid ? token * stride : kNoRow;
    }
  }

  template <bool kFull>
  __device__ __forceinline__ void load_next(uint32_t stage, int columns_left) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t destination = stage + destination_ + i * kPassBytes;
      const uint16_t* source = source_ + uint64_t{offset_[i]} * kElementsPerChunk;
      const bool valid = offset_[i] != kNoRow;
      if constexpr (kFull) {
        ptx::cp_async_16_if(destination, source, valid);
      } else if (valid) {
        ptx::cp_async_16_or_zero(destination, source, chunk() * kElementsPerChunk < columns_left);
      }
    }
    source_ += Traits::kStepColumns;
  }

 private:
  static constexpr int kRowsPerPass = Traits::kThreads / ColumnsLayout::kChunksPerRow;
  static constexpr int kPassBytes = Traits::kThreads * kBytesPerChunk;
  static constexpr int kPasses = ceil_div(Traits::kTokenBytes, kPassBytes);

  static __device__ __forceinline__ int row_of(int pass) {
    return thread_index() / ColumnsLayout::kChunksPerRow + pass * kRowsPerPass;
  }
  static __device__ __forceinline__ int chunk() {
    return thread_index() % ColumnsLayout::kChunksPerRow;
  }

  // Offset of a row's first chunk, in chunks, that means no row. The host ensures that real offsets
  // are below it.
  static constexpr uint32_t kNoRow = 0xffffffffu;

  const uint16_t* source_;
  uint32_t offset_[kPasses];
  int next_[kPasses];
  uint32_t destination_;
};

// Addresses of a warp's fragments in a stage.
template <class Traits>
class FragmentReader {
 public:
  __device__ __forceinline__ FragmentReader(int warp_m, int first_token) {
    const int lane = lane_index();
    if constexpr (Traits::kTransposed) {
      // Matrices of a fragment: chunks 0 and 1 at columns 0 to 7, then at columns 8 to 15.
      const int half = lane / 8 % 2;
      const int column = lane % 8 + lane / 16 * 8;
      const int chunk = Traits::kGated ? 8 * half + 4 * warp_m : 8 * warp_m + half;
      weights_ = RowsLayout::offset(column, chunk);
    } else {
      weights_ = ColumnsLayout::offset(warp_m * Traits::kWarpRows + lane % 16, lane / 16);
    }
    tokens_ = Traits::kWeightBytes +
              ColumnsLayout::offset(first_token + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    pin(weights_);
    pin(tokens_);
  }

  __device__ __forceinline__ void read_weights(uint32_t (&a)[4], uint32_t stage, int fragment,
                                               int slice) const {
    if constexpr (Traits::kTransposed) {
      const int chunks = (Traits::kGated ? 1 : 2) * fragment;
      ptx::ldmatrix_x4_trans(a,
                             ((stage + weights_) ^ static_cast<uint32_t>(chunks * kBytesPerChunk)) +
                                 16 * slice * RowsLayout::kRowBytes);
    } else {
      ptx::ldmatrix_x4(a, ((stage + weights_) ^ static_cast<uint32_t>(2 * slice * kBytesPerChunk)) +
                              16 * fragment * ColumnsLayout::kRowBytes);
    }
  }

  // Reads two fragments of 8 tokens each, or only the first.
  __device__ __forceinline__ void read_tokens(uint32_t (&b)[4], uint32_t stage, int pair, int slice,
                                              bool both) const {
    const uint32_t address =
        ((stage + tokens_) ^ static_cast<uint32_t>(2 * slice * kBytesPerChunk)) +
        16 * pair * ColumnsLayout::kRowBytes;
    if (both) {
      ptx::ldmatrix_x4(b, address);
    } else {
      ptx::ldmatrix_x2(b[0], b[1], address);
    }
  }

 private:
  uint32_t weights_;
  uint32_t tokens_;
};

}  // namespace flashmoe::moe::sm89
