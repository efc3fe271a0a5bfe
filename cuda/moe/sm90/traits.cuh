// Compile-time description of one sm_90 grouped product: tile, roles, stages, shared memory.
#pragma once

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::moe_sm90 {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kThreadsPerGroup = 128;  // a warpgroup
inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kBoxColumns = 64;  // 128 bytes, the widest swizzle
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kUnitTokens = 16;  // tiles are so many tokens wide, or a multiple
inline constexpr int kCluster = 2;     // blocks that share weights
inline constexpr int kHalves = 2;      // of a tile's weight rows: gate and up, or neighbours
inline constexpr int kHalfRows = 128;
inline constexpr int kTokenBoxRows = 32;
inline constexpr int kOutHeights = 3;  // boxes of the output, by rows: see below
inline constexpr int kOutBoxRows[kOutHeights] = {32, 8, 1};
inline constexpr int kTileInfoBytes = 32;  // a Tile in shared memory

// What a kernel does with its operands and its products.
enum class Use {
  kGatedUp,  // gathers rows of x, multiplies the activation of one half by the other
  kUp,       // gathers rows of x, activation
  kDown      // rows as they lie, products as they are
};

template <class Element_, Use kUse_>
struct Traits {
  using Element = Element_;
  static constexpr Use kUse = kUse_;
  static constexpr bool kGated = kUse == Use::kGatedUp;
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

}  // namespace flashmoe::moe_sm90
