// Tiles of 16-bit elements in shared memory for mma.sync: their layout, their copies by cp.async,
// and the addresses of a lane's fragments for ldmatrix.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe {

inline constexpr int kBytesPerChunk = 16;  // one cp.async, one ldmatrix row
inline constexpr int kElementsPerChunk = 8;

// A [rows, kDim] tile of 16-bit elements in shared memory. A swizzle permutes the 16-byte chunks of
// a row so that the eight rows of an 8x8 matrix lie in distinct banks, for any row length that is a
// multiple of 64 bytes.
template <int kDim_>
struct TileLayout {
  static constexpr int kDim = kDim_;
  static_assert(kDim % 32 == 0, "rows are multiples of 64 bytes");
  static constexpr int kChunksPerRow = kDim / kElementsPerChunk;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr bool kWide = kRowBytes % 128 == 0;
  static constexpr int kSwizzleChunks = kWide ? 8 : 4;

  static __device__ __forceinline__ uint32_t swizzle(int row) {
    return static_cast<uint32_t>(kWide ? row & 7 : (row >> 1) & 3);
  }
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes) +
           (static_cast<uint32_t>(chunk) ^ swizzle(row)) * kBytesPerChunk;
  }
  // ldmatrix addresses of one lane: `fragment_base` once, then `fragment` per pair of 16-element
  // columns. 2 * pair has a clear low bit and rows step by multiples of 8, so the swizzle is one
  // exclusive or with a constant.
  static __device__ __forceinline__ uint32_t fragment_base(uint32_t tile, int row, int half) {
    return tile + chunk_offset(row, half);
  }
  static __device__ __forceinline__ uint32_t fragment(uint32_t base, int row, int pair) {
    constexpr int kPairs = kSwizzleChunks / 2;
    return (base ^ static_cast<uint32_t>((pair % kPairs) * 2 * kBytesPerChunk)) +
           static_cast<uint32_t>((pair / kPairs) * kSwizzleChunks * kBytesPerChunk +
                                 row * kRowBytes);
  }
};

// Maps a row of a tile to a row of the matrix: the same row. Other orders permute bits of the index
// within a tile.
struct InOrder {
  static constexpr __host__ __device__ int row_of(int row) { return row; }
};

// Copies kRows consecutive rows of a [rows, dim] matrix into a tile and moves on to the next kRows.
// All threads of the block take part. Rows past the end and columns from `dim` on become zero.
template <class Layout, int kRows, int kThreads, class Order = InOrder>
class TileLoader {
 public:
  // `base` is the first row to copy. Offsets count from `tile`, an address in shared memory.
  __device__ __forceinline__ TileLoader(const uint16_t* base, int64_t row_stride, uint32_t tile)
      : source_(base + Order::row_of(row()) * row_stride + chunk() * kElementsPerChunk),
        address_(tile + Layout::chunk_offset(row(), chunk())) {
    pin(address_);
  }
  // For a matrix whose tiles have the layout of another's, `offset` bytes behind them. The two
  // share an address register.
  __device__ __forceinline__ TileLoader(const uint16_t* base, int64_t row_stride,
                                        const TileLoader& other, uint32_t offset)
      : source_(base + Order::row_of(row()) * row_stride + chunk() * kElementsPerChunk),
        address_(other.address_ + offset) {}

  // The matrix has `rows` rows left, counted from the first one of this tile.
  __device__ __forceinline__ void load_next(uint32_t offset, int64_t row_stride, int rows,
                                            int dim) {
    const uint32_t tile = address_ + offset;
    const int64_t pass_stride = kRowsPerPass * row_stride;
    if (rows >= kRows && dim == Layout::kDim) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (copies(i)) ptx::cp_async_16(pass_address(tile, i), source_);
        source_ += stride_to_next_pass(i, pass_stride, row_stride);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        // Without anything to copy, an address past the end is not accessed.
        const bool valid = Order::row_of(row()) + Order::row_of(i * kRowsPerPass) < rows &&
                           chunk() * kElementsPerChunk < dim;
        if (copies(i)) ptx::cp_async_16_or_zero(pass_address(tile, i), source_, valid);
        source_ += stride_to_next_pass(i, pass_stride, row_stride);
      }
    }
  }

  // The same for rows at any address: row_of(row) is the source of a row of the tile, or nullptr
  // for a row of zeros. All addresses are computed before the first copy because they may need
  // look-ups. The loader's own matrix is not used.
  template <class RowOf>
  __device__ __forceinline__ void load_rows(uint32_t offset, int dim, const RowOf& row_of) const {
    const uint32_t tile = address_ + offset;
    const bool in_row = chunk() * kElementsPerChunk < dim;
    const uint16_t* sources[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int own = Order::row_of(row()) + Order::row_of(i * kRowsPerPass);
      sources[i] = copies(i) && in_row ? row_of(own) : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool valid = sources[i] != nullptr;
      const uint16_t* const source = valid ? sources[i] + chunk() * kElementsPerChunk : sources[i];
      if (copies(i)) ptx::cp_async_16_or_zero(pass_address(tile, i), source, valid);
    }
  }

 private:
  static constexpr int next_power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
  }
  // Row lengths that are no power of two leave some lanes idle. That is cheaper than divisions.
  static constexpr int kLanesPerRow = next_power_of_two(Layout::kChunksPerRow);
  static constexpr int kRowsPerPass = kThreads / kLanesPerRow;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr uint32_t kPassBytes = static_cast<uint32_t>(kRowsPerPass * Layout::kRowBytes);
  // How a pass changes the swizzle of a thread's chunk: not at all, or one bit with every odd pass.
  static constexpr uint32_t kOddPassBit =
      kRowsPerPass % 8 == 0 ? 0 : Layout::kSwizzleChunks / 2 * kBytesPerChunk;
  static_assert(kRowsPerPass % 8 == 0 || kRowsPerPass == 4);

  // A pass covers whole bits of the row index.
  static __device__ __forceinline__ int64_t stride_to_next_pass(int pass, int64_t pass_stride,
                                                                int64_t row_stride) {
    const int rows = Order::row_of((pass + 1) * kRowsPerPass) - Order::row_of(pass * kRowsPerPass);
    return rows == kRowsPerPass ? pass_stride : rows * row_stride;
  }
  static __device__ __forceinline__ uint32_t pass_address(uint32_t first, int pass) {
    return (first ^ (pass % 2 == 1 ? kOddPassBit : 0)) + static_cast<uint32_t>(pass) * kPassBytes;
  }
  static __device__ __forceinline__ int row() { return reread::thread_index() / kLanesPerRow; }
  static __device__ __forceinline__ int chunk() { return reread::thread_index() % kLanesPerRow; }
  static __device__ __forceinline__ bool copies(int pass) {
    return (Layout::kChunksPerRow == kLanesPerRow || chunk() < Layout::kChunksPerRow) &&
           (kRows % kRowsPerPass == 0 || row() + pass * kRowsPerPass < kRows);
  }

  const uint16_t* source_;
  uint32_t address_;
};

// Shared-memory addresses of a lane's part of the fragments of a tile, for Layout::fragment.
template <class Layout>  // A operand: rows x k
__device__ __forceinline__ uint32_t a_fragments(uint32_t tile, int first_row) {
  const int lane = reread::lane_index();
  return Layout::fragment_base(tile, first_row + (lane & 15), lane >> 4);
}

template <class Layout>  // B operand stored as columns x k
__device__ __forceinline__ uint32_t b_fragments(uint32_t tile) {
  const int lane = reread::lane_index();
  return Layout::fragment_base(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

template <class Layout>  // B operand stored as k x columns
__device__ __forceinline__ uint32_t b_fragments_trans(uint32_t tile) {
  return a_fragments<Layout>(tile, 0);
}

}  // namespace flashmoe
