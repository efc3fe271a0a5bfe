// Compile-time description of the sm_89 kernel of weights' gradients.
#pragma once

#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89_backward {

inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB less 1 reserved
inline constexpr int kMaxSharedBytesPerSm = 100 * 1024;
inline constexpr int kReservedSharedBytes = 1024;  // of every block
inline constexpr int kBytesPerChunk = 16;          // one cp.async, one row that ldmatrix reads
inline constexpr int kElementsPerChunk = 8;

template <class Element_>
struct Traits {
  using Element = Element_;
  static constexpr int kTile = 128;     // rows and columns of the gradient
  static constexpr int kStepRows = 32;  // tokens in one stage
  static constexpr int kSlices = kStepRows / 16;
  static constexpr int kWarpTile = 64;  // of the 2 x 2 warps each
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kFragmentsM = kWarpTile / 16;
  static constexpr int kFragmentsN = kWarpTile / 8;
  static constexpr int kStages = 3;
  static constexpr int kBlocksPerSm = 2;

  // [a][b] of each stage, each [token][128 columns].
  static constexpr int kChunksPerRow = kTile / kElementsPerChunk;
  static constexpr int kRowBytes = kTile * 2;
  static constexpr int kOperandBytes = kStepRows * kRowBytes;
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;

  // Tiles of m that meet one tile of n after the other: the rows that blocks read at a time are
  // few columns of both operands.
  static constexpr int kSwizzle = 16;

  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kBlocksPerSm * (kSharedBytes + kReservedSharedBytes) <= kMaxSharedBytesPerSm);
};

}  // namespace flashmoe::moe::sm89_backward
