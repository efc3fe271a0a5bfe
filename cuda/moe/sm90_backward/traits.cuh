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
  static constexpr int kStages = 8;  // steps in shared memory
  static constexpr int kLag = 2;     // steps by which the second consumer lags behind the first
  static_assert(kLag + 1 < kStages && kStep == kThreadsPerWarp);

  static constexpr int kThreads = (1 + kConsumers) * kThreadsPerGroup;
  // The first warpgroup: one warp issues the copies by TMA, and three gather, taking steps in turn.
  static constexpr int kGatherWarps = 3;
  // setmaxnreg: the block divides the registers of its launch, 168 per thread.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers));

  static constexpr int kConsumerM = 64;  // the M of wgmma
  static constexpr int kTileM = kConsumers * kConsumerM;
  static constexpr int kTileN = 256;
  // A stage: for each 64 columns of the first operand, then of the second, [kStep rows][64].
  static constexpr int kBoxBytes = kStep * kBoxColumns * 2;
  static constexpr int kFirstBytes = kTileM / kBoxColumns * kBoxBytes;
  static constexpr int kSecondBytes = kTileN / kBoxColumns * kBoxBytes;
  static constexpr int kStageBytes = kFirstBytes + kSecondBytes;
  static constexpr int kHalfBoxes = kTileN / kBoxColumns / kCluster;  // a block copies, for both

  // A 16-bit gradient is stored in boxes of 64 by 64, two at a time per consumer.
  static constexpr int kOutBox = 64;
  static constexpr int kOutBoxBytes = kOutBox * kOutBox * 2;
  static constexpr int kOutBoxes = 2;

  static constexpr int kOutOffset = kStages * kStageBytes;
  static constexpr int kBarriersOffset = kOutOffset + kConsumers * kOutBoxes * kOutBoxBytes;
  // Upper bound on the items that a block has received and some of its warps have not read.
  static constexpr int kItemSlots = 4;
  static constexpr int kItemsOffset = kBarriersOffset + 8 * 2 * (kStages + kItemSlots);
  static constexpr int kSharedBytes = kItemsOffset + 16 * kItemSlots;
  static_assert(kSharedBytes <= 227 * 1024, "an sm_90 block holds 227 KiB");
};

}  // namespace flashmoe::moe::sm90_backward
