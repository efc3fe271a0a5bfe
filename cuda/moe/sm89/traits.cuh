// Compile-time description of one sm_89 grouped-product kernel: tile, warps, stages, shared memory.
#pragma once

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::moe::sm89 {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB less 1 reserved
inline constexpr int kBytesPerChunk = 16;                  // one cp.async, one ldmatrix row
inline constexpr int kElementsPerChunk = 8;
inline constexpr int kMaxExperts = 1024;
inline constexpr int kExpertsPerChunk = kThreadsPerWarp;  // of the schedule: one a lane
inline constexpr int kExpertChunks = kMaxExperts / kExpertsPerChunk;
inline constexpr int kTileRing = 16;  // tiles between the one computed and the one looked up

// What the rows of an output are made of: of rows of one matrix, or of a gate and an up.
enum class Rows { kPlain, kGated };
// Which stride of the weights is 1: the columns', or the rows'.
enum class Major { kColumns, kRows };

// Warps of a block, each with 64 weight rows and up to 64 tokens of a tile.
struct Tuning {
  int warps_m;
  int warps_n;
  int stages;
  int blocks_per_sm;
};

#ifndef TUN
#define TUN 2441
#define KC 32
#endif
inline constexpr Tuning kTuning = {TUN / 1000, TUN / 100 % 10, TUN / 10 % 10, TUN % 10};

template <class Element_, Rows kRows_, Major kMajor_>
struct Traits {
  using Element = Element_;
  static constexpr bool kGated = kRows_ == Rows::kGated;
  static constexpr bool kTransposed = kMajor_ == Major::kRows;
  static constexpr int kWarpsM = kTuning.warps_m;
  static constexpr int kWarpsN = kTuning.warps_n;
  static constexpr int kWarps = kWarpsM * kWarpsN;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kStages = kTuning.stages;
  static constexpr int kBlocksPerSm = kTuning.blocks_per_sm;

  static constexpr int kStepColumns = KC;  // of K in one stage
  static constexpr int kSlices = kStepColumns / 16;
  static constexpr int kWarpRows = 64;
  static constexpr int kRowFragments = kWarpRows / 16;
  static constexpr int kTileRows = kWarpsM * kWarpRows;  // weight rows, gate and up counted both
  static constexpr int kOutRows = kGated ? kTileRows / 2 : kTileRows;  // columns of out
  static constexpr int kWarpOutRows = kOutRows / kWarpsM;
  static constexpr int kMaxTokenFragments = 8;  // of a warp, 8 tokens each
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
      kTileRing * 16 + 2 * kExpertChunks * 4 + 8 + 2 * kMaxExperts;
  static constexpr int kSharedBytes = kScheduleOffset + kScheduleBytes;

  static_assert(kScheduleOffset % 16 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kStages >= 2, "one is read, one is filled");
};

}  // namespace flashmoe::moe::sm89
