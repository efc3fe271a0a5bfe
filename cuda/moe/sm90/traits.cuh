// Compile-time description of one sm_90 grouped product: tile, roles, stages, shared memory.
#pragma once

#include "cuda/moe/sm90/entry.h"
#include "cuda/moe/sm90/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm90 {

inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kConsumerRows = 64;   // rows of weights, of either half: the M of wgmma
inline constexpr int kTileInfoBytes = 32;  // a Tile in shared memory

template <class Element_, Use kUse_, Major kMajor_ = Major::kColumns>
struct Traits {
  using Element = Element_;
  static constexpr Use kUse = kUse_;
  static constexpr bool kTransposed = kMajor_ != Major::kColumns;
  static constexpr bool kInterleaved = kMajor_ == Major::kRowsInterleaved;  // rows of gate and up
  static constexpr bool kNarrow = kUse == Use::kNarrowGatedUp;
  static constexpr bool kPlain = kUse == Use::kPlainGatedUp || kNarrow;
  static constexpr bool kGated = kUse == Use::kGatedUp || kPlain;
  // For short rows, weights are kept in registers while runs of token tiles pass by.
  static constexpr bool kKeepsMore = kUse == Use::kMiddleDown;  // with narrower tiles
  static constexpr bool kKeeps = kUse == Use::kShortDown || kKeepsMore;
  static constexpr bool kWide = kUse == Use::kWideDown;
  static constexpr bool kGathers = kUse != Use::kDown && !kWide && !kKeeps;
  // Further steps follow those of the products: g and u come by tokens, and their gradients leave.
  static constexpr bool kDifferentiates = kUse == Use::kUpGradient;
  static constexpr bool kAnnounces = kGathers && !kDifferentiates;  // announces stored tiles
  static_assert(kGated || !kInterleaved);
  static_assert(!kKeeps || !kTransposed);

  // Whether consumers have a tile each, so that one's products overlap the other's stores.
  // Otherwise they share a tile.
  static constexpr bool kAlternates = kUse == Use::kDown || kWide;

  static constexpr int kThreads = (1 + kConsumers) * kThreadsPerGroup;
  // The first warpgroup: one warp issues the copies by TMA, three gather.
  static constexpr int kGatherThreads = 3 * kThreadsPerWarp;
  // setmaxnreg: the block divides the registers of its launch, 168 per thread.
  static constexpr int kProducerRegisters = kUse == Use::kShortDown ? 88 : 56;
  static constexpr int kConsumerRegisters = kUse == Use::kShortDown ? 208 : 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers));

  static constexpr int kHalfRows = kGathers ? kConsumers * kConsumerRows : kConsumerRows;
  static constexpr int kTileRows = kHalves * kHalfRows;  // rows of weights
  static constexpr int kOutRows = kGated ? kHalfRows : kTileRows;
  static constexpr int kTileTokens = kNarrow ? 96 : kKeepsMore ? 128 : 192;
  static constexpr int kTileUnits = kTileTokens / kUnitTokens;
  // Compiled widths are multiples of this many units. The longer the epilogue, the fewer widths.
  static constexpr int kUnitSteps = kPlain || !(kGathers || kWide) ? 1
                                    : kGated || kDifferentiates    ? 2
                                                                   : 4;
  static_assert(kTileUnits % kUnitSteps == 0);
  static constexpr int kMostOddTiles = 5;  // of an expert's tokens, if pairs share weights
  // Columns of items that the weights of an expert pass by together. With this many token tiles,
  // concurrent clusters work on about equally many rows of tokens and of weights, and so read least
  // of both.
  static constexpr int kColumnsPerGroup = kGathers ? 8 : 16;
  static constexpr int kStep = kBoxColumns;  // columns per step of the main loop
  static constexpr int kStages = kKeepsMore ? 12 : kKeeps ? 8 : kAlternates || kNarrow ? 5 : 4;
  static constexpr int kKeptSteps = (kKeepsMore ? kMostKeptOfFewer : kMostKeptColumns) / kStep;

  // A stage has weights [half][row][64], if transposed [half][64 rows][column][64], and tokens
  // [token][64]. With kept weights it has either.
  static constexpr int kHalfBytes = kHalfRows * kBoxRowBytes;
  static constexpr int kWeightBytes = kHalves * kHalfBytes;
  static constexpr int kBoxRows = kTransposed ? kBoxColumns : 128;  // rows of weights per copy
  static constexpr int kBoxBytes = kBoxRows * kBoxRowBytes;
  static_assert(kStep == kBoxColumns && (kGathers ? kHalfRows : kTileRows) % kBoxRows == 0);
  static_assert(!kInterleaved || kBoxRows == kConsumerRows);
  // Distances in rows of the weights' tensor: between tiles, halves of a tile, and boxes of a half.
  static constexpr int kRowsToTile = (kInterleaved ? kHalves : 1) * kOutRows;
  static constexpr int kRowsToHalf = kInterleaved ? kBoxRows : kGated ? 0 : kHalfRows;
  static constexpr int kRowsToBox = (kInterleaved ? kHalves : 1) * kBoxRows;
  static constexpr int kTokenBytes = kTileTokens * kBoxRowBytes;
  static constexpr int kTokensOffset = kKeeps ? 0 : kWeightBytes;  // within a stage
  static constexpr int kStageBytes =
      kTokensOffset + (!kKeeps || kTokenBytes > kWeightBytes ? kTokenBytes : kWeightBytes);

  // Output of `up` is stored through its tile's last stage: a consumer's own 64 rows of both halves
  // of the weights are a buffer each, and part of the tokens is a third, if there are enough. Other
  // kernels have separate buffers.
  static constexpr int kOutTokens = kDifferentiates        ? kGradientTokens
                                    : kAnnounces || kKeeps ? 64
                                                           : 96;
  static constexpr int kOutBytes = kOutTokens * kBoxRowBytes;
  static constexpr bool kStoresByTokens = kAnnounces && kTokenBytes >= kConsumers * kOutBytes;
  static constexpr int kOutBuffers = kStoresByTokens ? 3 : kGathers || kKeeps ? 2 : 1;
  static_assert(!kAnnounces || kOutBytes == kConsumerRows * kBoxRowBytes);

  // The stage of a step of kGradientTokens tokens: boxes of g and u, which their gradients replace,
  // and of a, each [half][consumer][token][64]. Then come tokens and weights of the slots, from a
  // multiple of 16 bytes on, and sums of warps.
  static constexpr int kBoxes = kHalves * kConsumers;
  static constexpr int kUpBoxesOffset = kBoxes * kOutBytes;
  static constexpr int kActivatedOffset = 2 * kUpBoxesOffset;
  static constexpr int kSlotBytes = 4 * kGradientTokens + 16;
  static constexpr int kSlotTokensOffset = kActivatedOffset + kBoxes * kOutBytes;
  static constexpr int kSlotWeightsOffset = kSlotTokensOffset + kSlotBytes;
  static constexpr int kSumsOffset = kSlotWeightsOffset + kSlotBytes;
  // Terms of the tokens' dots: of a warp, those of four pairs of lanes, each row for all tokens.
  // Between rows is room, so that lanes store to different banks.
  static constexpr int kTermRows = 4;
  static constexpr int kTermBytes = 4 * (kGradientTokens + 8);
  static constexpr int kSumsBytes = 4 * kTermRows * kTermBytes;  // per consumer, for four warps
  // Data that only threads access must not lie where the copy engine loads weights.
  static_assert(!kDifferentiates || (kSumsOffset >= kWeightBytes &&
                                     kSumsOffset + kConsumers * kSumsBytes <= kStageBytes));
  // Steps after the products of a tile of `units` units.
  static constexpr __host__ __device__ int steps_behind(int units) {
    return kDifferentiates ? (units * kUnitTokens + kGradientTokens - 1) / kGradientTokens : 0;
  }

  // Tiles in flight: those loaded ahead, one per stage; those being finished; and an end marker for
  // each consumer with tiles of its own, which is known without a wait for a stage.
  static constexpr int kTileSlots = kGathers ? 8 : 16;
  static_assert(kStages + 2 + (kAlternates ? kConsumers : 1) <= kTileSlots);

  static constexpr int kOutOffset = kStages * kStageBytes;
  static constexpr int kScalesOffset =
      kOutOffset + (kGathers ? 0 : kConsumers * kOutBuffers * kOutBytes);
  static constexpr int kScaleBytes = kAnnounces ? kTileTokens * 4 : 0;  // per consumer
  static constexpr int kRowsOffset = kScalesOffset + kConsumers * kScaleBytes;
  static constexpr int kRowsBytes = kGathers ? kTileTokens * 4 : 0;
  static constexpr int kTilesOffset = kRowsOffset + kRowsBytes;
  static constexpr int kBarriersOffset = kTilesOffset + kTileSlots * kTileInfoBytes;
  static constexpr int kBarriers = 2 * kStages + kTileSlots + (kGathers ? 0 : kTileSlots);
  static constexpr int kItemsOffset = kBarriersOffset + 8 * kBarriers;
  static constexpr int kSharedBytes = kItemsOffset + (kGathers ? 0 : 4 * kTileSlots);

  static_assert(kStageBytes % kSharedAlignment == 0 && kOutBytes % kSharedAlignment == 0);
  static_assert(kGathers || kTileUnits <= kTokenBoxes);
  static_assert(kOutTokens % kUnitTokens == 0);
  static_assert(kNarrow || kTileTokens % kOutTokens == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_90 block holds 227 KiB");
};

}  // namespace flashmoe::moe::sm90
