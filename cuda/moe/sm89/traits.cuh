// Compile-time description of one sm_89 grouped-product kernel: tile, warps, stages, shared memory.
#pragma once

#include "core/ops/moe/problem.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89 {

inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB minus 1 reserved
inline constexpr int kBytesPerChunk = 16;                  // one cp.async, one ldmatrix row
inline constexpr int kElementsPerChunk = 8;
inline constexpr int kExpertsPerChunk = kThreadsPerWarp;  // of the schedule: one per lane
inline constexpr int kExpertChunks = static_cast<int>(kMaxExperts) / kExpertsPerChunk;
inline constexpr int kTileRing = 16;  // tiles between the one computed and the one looked up

// Whether rows of an output come from rows of one matrix, or from a gate and an up.
enum class Rows { kPlain, kGated };
// Which stride of the weights is 1: that of columns, or that of rows.
enum class Major { kColumns, kRows };

template <class Element_, Rows kRows_, Major kMajor_>
struct Traits {
  using Element = Element_;
  static constexpr bool kGated = kRows_ == Rows::kGated;
  static constexpr bool kTransposed = kMajor_ == Major::kRows;
  // Each warp has 64 weight rows and up to 72 tokens of a tile.
  static constexpr int kWarpsM = 2;
  static constexpr int kWarpsN = 4;
  static constexpr int kWarps = kWarpsM * kWarpsN;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kStages = 3;
  static constexpr int kBlocksPerSm = 1;

  static constexpr int kStepColumns = 32;  // columns of K per stage
  static constexpr int kSlices = kStepColumns / 16;
  static constexpr int kWarpRows = 64;
  static constexpr int kRowFragments = kWarpRows / 16;
  static constexpr int kTileRows = kWarpsM * kWarpRows;  // weight rows, gate and up both counted
  static constexpr int kOutRows = kGated ? kTileRows / 2 : kTileRows;  // columns of out
  static constexpr int kWarpOutRows = kOutRows / kWarpsM;
  static constexpr int kMaxTokenFragments = 9;  // per warp, 8 tokens each
  static constexpr int kTokensPerFragment = 8 * kWarpsN;
  static constexpr int kTileTokens = kMaxTokenFragments * kTokensPerFragment;
  static constexpr int kFewTokens = 3 * kTokensPerFragment;  // see TokenTiles

  // [weights][tokens] of each stage, then the schedule.
  static constexpr int kRowBytes = kStepColumns * 2;
  static constexpr int kWeightBytes = kTileRows * kRowBytes;
  static constexpr int kTokenBytes = kTileTokens * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr int kScheduleOffset = kStages * kStageBytes;
  static constexpr int kScheduleBytes =
      kTileRing * 16 + 2 * kExpertChunks * 4 + 8 + 2 * kExpertChunks * kExpertsPerChunk;
  static constexpr int kSharedBytes = kScheduleOffset + kScheduleBytes;

  static_assert(kScheduleOffset % 16 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kStages >= 2, "one is read, one is filled");
};

}  // namespace flashmoe::moe::sm89
