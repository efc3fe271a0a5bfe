// Compile-time description of one sm_90 attention kernel: tile, roles, stages, shared memory.
#pragma once

#include "cuda/attention/sm90/kv_block_alignment.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::sm90 {

inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kBoxColumns = 64;  // 128 bytes, the widest swizzle
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kTileBytes = 32;  // a Tile, or TilePart, in shared memory
// Tiles in flight: those whose Q is there, the one before them that is being written out, and the
// one behind them whose first portion of Q is there.
inline constexpr int kTileSlots = 4;

// The choices that differ from one head dimension to the next; docs/kernels/attention_sm90.md has
// the measurements behind the table.
struct Tuning {
  int consumers;        // warpgroups of 64 query rows
  int step_keys;        // keys of one step of the main loop
  int stages;           // steps of K, and of V, in flight or in use
  int q_stages;         // tiles of Q
  bool ordered;         // consumers issue the products of a step one after another
  int output_boxes;     // of 64 columns of a group's output that leave at a time
  bool capped = false;  // logits have a softcap
  bool split = false;  // keys are split over blocks, rows are those of all query heads of a KV head
};

constexpr Tuning tuning(int dim, int dim_v) {
  if (dim <= 64) return {3, 128, 3, 2, true, 1};
  if (dim <= 128) return {2, 128, 2, 2, true, 2};
  if (dim <= 192 && dim_v <= 128) return {2, 128, 2, 1, true, 1};
  if (dim <= 192) return {2, 96, 2, 1, true, 2};
  return {2, 64, 2, 1, false, 2};
}

template <int kDim, int kDimV>
struct TableTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
};

// With a softcap, in kernels of their own: in the others its code would take registers and cache
// lines from the main loop.
template <int kDim, int kDimV>
struct CappedTuning {
  static constexpr Tuning value = [] {
    Tuning capped = tuning(kDim, kDimV);
    capped.capped = true;
    return capped;
  }();
};

// Keys split over blocks, which leave parts of the output in fp32 for a second kernel.
template <int kDim, int kDimV>
struct SplitTuning {
  static constexpr Tuning value = [] {
    Tuning split = tuning(kDim, kDimV);
    split.split = true;
    return split;
  }();
};

template <int kDim, int kDimV>
struct CappedSplitTuning {
  static constexpr Tuning value = [] {
    Tuning split = SplitTuning<kDim, kDimV>::value;
    split.capped = true;
    return split;
  }();
};

template <class Element_, int kDim_, int kDimV_, class TuningOf = TableTuning<kDim_, kDimV_>>
struct Traits {
  static constexpr Tuning kTuning = TuningOf::value;
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kConsumers = kTuning.consumers;
  static constexpr int kThreads = (kConsumers + 1) * kThreadsPerGroup;
  static constexpr int kTileQ = kConsumers * kRowsPerGroup;
  static constexpr int kStepKeys = kTuning.step_keys;
  static constexpr int kStages = kTuning.stages;
  static constexpr int kQStages = kTuning.q_stages;
  static constexpr bool kOrdered = kTuning.ordered;
  static constexpr bool kCapped = kTuning.capped;
  static constexpr bool kSplit = kTuning.split;

  // Keys of a narrow step: the first of a tile, where no row of a group sees more of it. Not with a
  // softcap, where products are not what takes the time, nor where it leaves too few registers.
  static constexpr bool kNarrows =
      kStepKeys == 2 * kRowsPerGroup && !kCapped && !(kSplit && kDim > 128);
  static constexpr int kNarrowKeys = kNarrows ? kRowsPerGroup : kStepKeys;

  // setmaxnreg: 64 Ki registers are 512 for each thread of a warpgroup.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 512);

  // Tiles are boxes of 64 columns side by side: K and V [dim / 64][keys][64], Q and the output
  // [group][dim / 64][rows of the group][64].
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  static constexpr int kBoxesV = ceil_div(kDimV, kBoxColumns);
  static constexpr int kRowBoxBytes = kRowsPerGroup * kBoxRowBytes;
  static constexpr int kKVBoxBytes = kStepKeys * kBoxRowBytes;
  static constexpr int kQBytesPerGroup = kBoxes * kRowBoxBytes;
  static constexpr int kQBytes = kConsumers * kQBytesPerGroup;
  static constexpr int kKBytes = kBoxes * kKVBoxBytes;
  static constexpr int kVBytes = kBoxesV * kKVBoxBytes;
  static constexpr int kOutputBoxes = kTuning.output_boxes;
  static constexpr int kOutputParts = ceil_div(kBoxesV, kOutputBoxes);
  static constexpr int kOBytesPerGroup = kOutputBoxes * kRowBoxBytes;
  static constexpr int kOBytes = kSplit ? 0 : kConsumers * kOBytesPerGroup;
  // What a part leaves: units of four floats of each row, and its maximum and sum.
  static constexpr int kUnitsPerRow = kDimV / 4;
  static constexpr int kPartBytes = kSplit ? kTileQ * (kUnitsPerRow * 16 + 8) : 0;
  // A single tile of Q is given back group by group.
  static constexpr int kQPortions = kQStages == 1 ? kConsumers : 1;
  static constexpr int kGroupsPerPortion = kConsumers / kQPortions;

  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = kQStages * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kOOffset = kVOffset + kStages * kVBytes;
  static constexpr int kTilesOffset = kOOffset + kOBytes;
  static constexpr int kBarriersOffset = kTilesOffset + kTileSlots * kTileBytes;
  // Barriers: K full, K empty, V full, V empty, Q full, Q empty, each for all stages; those of Q
  // for all portions of a stage.
  static constexpr int kBarriers = 4 * kStages + 2 * kQStages * kQPortions;
  static constexpr int kSharedBytes = kBarriersOffset + 8 * kBarriers + kSharedAlignment;

  static_assert(kStepKeys % 16 == 0 && kKVBoxBytes % kSharedAlignment == 0);
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_90 block holds 227 KiB");
  static_assert(kQStages + (kQPortions > 1 ? 1 : 0) + 1 < kTileSlots);
  static_assert(kStepKeys <= 256, "a box has at most 256 rows");
};

}  // namespace flashmoe::sm90
