// Compile-time description of one sm_90 grouped product: tile, roles, stages, shared memory.
#pragma once

#include "cuda/moe/sm90/entry.h"
#include "cuda/moe/sm90/params.h"
#include "cuda/numeric/dtype.cuh"

namespace flashmoe::moe::sm90 {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kThreadsPerGroup = 128;  // a warpgroup
inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kUnitTokens = 16;     // tiles are so many tokens wide, or a multiple
inline constexpr int kTileInfoBytes = 32;  // a Tile in shared memory

template <class Element_, Use kUse_>
struct Traits {
  using Element = Element_;
  static constexpr Use kUse = kUse_;
  static constexpr bool kPlain = kUse == Use::kPlainGatedUp;
  static constexpr bool kGated = kUse == Use::kGatedUp || kPlain;
  static constexpr bool kGathers = kUse != Use::kDown;

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (1 + kConsumers) * kThreadsPerGroup;
  // The first warpgroup: one warp issues the copies by TMA, three gather.
  static constexpr int kGatherThreads = 3 * kThreadsPerWarp;
  // setmaxnreg: what the block was launched with, 168 a thread, is all there is to divide.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers));

  static constexpr int kTileRows = kHalves * kHalfRows;  // of weights
  static constexpr int kOutRows = kGated ? kHalfRows : kTileRows;
  static constexpr int kTileTokens = 192;
  static constexpr int kTileUnits = kTileTokens / kUnitTokens;
  // Widths that there is code for are multiples of so many units: the more follows the main loop, the
  // fewer.
  static constexpr int kUnitSteps = kPlain || !kGathers ? 1 : kGated ? 2 : 4;
  static_assert(kTileUnits % kUnitSteps == 0);
  static constexpr int kStep = kBoxColumns;  // columns of one step of the main loop
  static constexpr int kStages = 4;

  // A stage: weights [half][row][64], tokens [token][64].
  static constexpr int kHalfBytes = kHalfRows * kBoxRowBytes;
  static constexpr int kWeightBytes = kHalves * kHalfBytes;
  static constexpr int kTokenBytes = kTileTokens * kBoxRowBytes;
  static constexpr int kTokenBoxBytes = kTokenBoxRows * kBoxRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // Output leaves by way of the last stage of its tile: a consumer's own 64 rows of both halves of the
  // weights are a buffer each.
  static constexpr int kOutBuffers = kHalves;
  static constexpr int kOutBytes = kHalfBytes / kConsumers;
  static constexpr int kOutTokens = kOutBytes / kBoxRowBytes;

  // Tiles in flight: loaded ahead, one with each stage, and being finished.
  static constexpr int kTileSlots = 8;
  static_assert(kStages + 2 <= kTileSlots);

  static constexpr int kScalesOffset = kStages * kStageBytes;
  static constexpr int kScaleBytes = kTileTokens * 4;  // of a consumer
  static constexpr int kTilesOffset = kScalesOffset + kConsumers * kScaleBytes;
  static constexpr int kBarriersOffset = kTilesOffset + kTileSlots * kTileInfoBytes;
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kSharedBytes = kBarriersOffset + 8 * kBarriers + kSharedAlignment;

  static_assert(kStageBytes % kSharedAlignment == 0 && kOutBytes % kSharedAlignment == 0);
  static_assert(kTileTokens % kTokenBoxRows == 0 && kOutTokens % kOutBoxRows[0] == 0);
  static_assert(kTileTokens % kOutTokens == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_90 block holds 227 KiB");
};

}  // namespace flashmoe::moe::sm90
