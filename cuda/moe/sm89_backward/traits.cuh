// Compile-time description of the sm_89 kernel of weights' gradients.
#pragma once

#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89_backward {

inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB minus 1 reserved
inline constexpr int kBytesPerChunk = 16;                  // one cp.async, one ldmatrix row
inline constexpr int kElementsPerChunk = 8;

template <class Element_>
struct Traits {
  using Element = Element_;
  static constexpr int kTileM = 128;    // rows of the gradient, columns of a
  static constexpr int kTileN = 256;    // columns of the gradient and of b
  static constexpr int kStepRows = 32;  // tokens per stage
  static constexpr int kSlices = kStepRows / 16;
  static constexpr int kWarpTile = 64;  // rows and columns
  static constexpr int kWarpsM = kTileM / kWarpTile;
  static constexpr int kWarps = kWarpsM * (kTileN / kWarpTile);
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kFragmentsM = kWarpTile / 16;
  static constexpr int kFragmentsN = kWarpTile / 8;
  static constexpr int kStages = 3;
  static constexpr int kBlocksPerSm = 1;

  // [a][b] of each stage, [token][kTileM or kTileN columns]; then the barrier.
  static constexpr int kABytes = kStepRows * kTileM * 2;
  static constexpr int kBBytes = kStepRows * kTileN * 2;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 16;

  // Tiles of m that meet one tile of n after the other. So the rows that blocks read at a time have
  // few columns of both operands.
  static constexpr int kSwizzle = 16;

  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kSlices == 2,
                "the first slice's fragments are in one place, the last's in another");
};

}  // namespace flashmoe::moe::sm89_backward
