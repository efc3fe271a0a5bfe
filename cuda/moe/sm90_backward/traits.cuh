// Compile-time description of the sm_90 gradient of experts' weights: tile, roles, stages, shared
// memory.
#pragma once

#include "cuda/moe/sm90_backward/params.h"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm90_backward {

template <class Element_>
struct Traits {
  using Element = Element_;
  static constexpr int kStep = 32;   // rows of an expert per step of the main loop
  static constexpr int kStages = 6;  // steps in shared memory
  static constexpr int kLag = 2;     // steps by which the second consumer lags behind the first
  static_assert(kLag + 1 < kStages && kStep == kThreadsPerWarp);

  static constexpr int kThreads = (1 + kConsumers) * kThreadsPerGroup;
  // The first warpgroup: one warp issues the copies by TMA, and three gather, taking steps in turn.
  static constexpr int kGatherWarps = 3;
  // setmaxnreg: the block divides the registers of its launch, 168 per thread.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers));

  static constexpr int kPartM = 64;  // the M of wgmma
  static constexpr int kParts = 2;   // of a consumer
  static constexpr int kConsumerM = kParts * kPartM;
  static constexpr int kTileM = kConsumers * kConsumerM;
  static constexpr int kTileN = 192;        // of most tiles
  static constexpr int kNarrowTileN = 128;  // of the last ones, so that less is beyond the gradient
  // A stage: for each 64 columns of `a`, then of `b`, [kStep rows][64].
  static constexpr int kBoxBytes = kStep * kBoxColumns * 2;
  static constexpr int kABoxes = kTileM / kBoxColumns;
  static constexpr int kBBoxes = kTileN / kBoxColumns;
  static constexpr int kNarrowBBoxes = kNarrowTileN / kBoxColumns;
  static_assert(kNarrowBBoxes == kBBoxes - 1);
  static constexpr int kABytes = kABoxes * kBoxBytes;
  static constexpr int kStageBytes = kABytes + kBBoxes * kBoxBytes;
  // What a block copies for both of its cluster: half of the columns of `a`, or of the rows of `b`.
  static constexpr int kHalfABoxes = kABoxes / kCluster;
  static constexpr int kHalfBRows = kStep / kCluster;

  // A 16-bit gradient is stored in boxes of 64 by 64: those of a part, for each consumer.
  static constexpr int kOutBox = 64;
  static constexpr int kOutBoxBytes = kOutBox * kOutBox * 2;
  static constexpr int kOutBoxes = kTileN / kOutBox;

  static constexpr int kOutOffset = kStages * kStageBytes;
  static constexpr int kBarriersOffset = kOutOffset + kConsumers * kOutBoxes * kOutBoxBytes;
  // Upper bound on the items that a block has received and some of its warps have not read.
  static constexpr int kItemSlots = 4;
  static constexpr int kItemsOffset = kBarriersOffset + 8 * 2 * (kStages + kItemSlots);
  static constexpr int kSharedBytes = kItemsOffset + 16 * kItemSlots;
  static_assert(kSharedBytes <= 227 * 1024, "an sm_90 block holds 227 KiB");
};

}  // namespace flashmoe::moe::sm90_backward
