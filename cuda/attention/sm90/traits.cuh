// Compile-time description of one sm_90 attention kernel: tile, roles, stages, shared memory.
#pragma once

#include "cuda/attention/sm90/kv_block_alignment.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/ragged_order.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::sm90 {

inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kBoxColumns = 64;  // 128 bytes, the widest swizzle
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kTileBytes = 32;  // a Tile, or TilePart, in shared memory
// Tiles in flight: those whose Q has arrived, the one before them that is being written, and the
// one after them whose first portion of Q has arrived.
inline constexpr int kTilesInFlight = 4;
inline constexpr int kRaggedTileBytes = 80;     // a RaggedTile of ragged kernels
inline constexpr int kChunkSequenceBytes = 32;  // a sequence of a chunk

// Choices per head dimension; docs/kernels/attention_sm90.md has the measurements behind the table.
struct Tuning {
  int consumers;        // warpgroups of 64 query rows
  int step_keys;        // keys per step of the main loop
  int stages;           // steps of K, and of V, in flight or in use
  int q_stages;         // tiles of Q
  bool ordered;         // consumers take turns to issue the products of a step
  int output_boxes;     // boxes of 64 columns of a group's output that are stored at a time
  bool capped = false;  // logits have a softcap
  bool split = false;  // keys are split over blocks; rows are those of all query heads of a KV head
  bool ragged = false;   // the batch is sequences; tables give their positions and lengths
  bool packed = false;   // of these: a group's rows are queries of all query heads of a KV head
  int window_steps = 0;  // steps that hold all keys of a group at once (window.cuh)
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

// Softcaps have kernels of their own: in other kernels their code would take registers and cache
// lines from the main loop.
template <int kDim, int kDimV>
struct CappedTuning {
  static constexpr Tuning value = [] {
    Tuning capped = tuning(kDim, kDimV);
    capped.capped = true;
    return capped;
  }();
};

// Keys are split over blocks, which leave fp32 parts of the output for a second kernel.
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

// For sequences (ragged.cuh).
template <int kDim, int kDimV>
struct RaggedTuning {
  static constexpr Tuning value = [] {
    Tuning ragged = tuning(kDim, kDimV);
    ragged.ragged = true;
    return ragged;
  }();
};

template <int kDim, int kDimV>
struct CappedRaggedTuning {
  static constexpr Tuning value = [] {
    Tuning ragged = RaggedTuning<kDim, kDimV>::value;
    ragged.capped = true;
    // With three consumers a thread would have too few registers. This changes no bit: steps begin
    // where they do in tiles of three.
    if (ragged.consumers == 3) ragged.consumers = 2;
    return ragged;
  }();
};

// For sequences of few queries.
template <int kDim, int kDimV>
struct PackedRaggedTuning {
  static constexpr Tuning value = [] {
    Tuning ragged = RaggedTuning<kDim, kDimV>::value;
    ragged.packed = true;
    return ragged;
  }();
};

// For short windows (window.cuh).
template <int kDim, int kDimV>
struct WindowTuning {
  static constexpr Tuning value = [] {
    Tuning window = {3, 64, 9, 2, false, 1};
    window.window_steps = 3;
    return window;
  }();
};

template <int kDim, int kDimV>
struct RaggedWindowTuning {
  static constexpr Tuning value = [] {
    Tuning window = WindowTuning<kDim, kDimV>::value;
    window.ragged = true;
    return window;
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
  static constexpr bool kRagged = kTuning.ragged;
  // Whether a group has packed_heads rows for each of its queries (pack_gqa).
  static constexpr bool kPacked = kSplit || kTuning.packed;
  static constexpr int kWindowSteps = kTuning.window_steps;
  // Keys, beside one, that a row may see: those of 64 rows then fit into kWindowSteps steps. 0 for
  // kernels that take any number of steps.
  static constexpr int kWindowKeys =
      kWindowSteps > 0 ? kWindowSteps * kStepKeys - kRowsPerGroup : 0;

  // Keys of a narrow step: the first step of a tile, if no row of a group sees more of it. There is
  // none with a softcap, where products are not the bottleneck, or where it would leave too few
  // registers.
  static constexpr bool kNarrows =
      kStepKeys == 2 * kRowsPerGroup && !kCapped && !(kSplit && kDim > 128);
  static constexpr int kNarrowKeys = kNarrows ? kRowsPerGroup : kStepKeys;

  // setmaxnreg: a block has the registers that it is launched with. Each thread gets as many as 64
  // Ki registers allow, a multiple of 8. The producer roles of ragged kernels need more.
  static constexpr int kLaunchRegisters = (64 * 1024 / kThreads) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kRagged ? 40 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kRagged ? 232 : 240;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * kLaunchRegisters);

  // Tiles are boxes of 64 columns, one after another: K and V [dim / 64][keys][64], Q and the
  // output [group][dim / 64][rows of the group][64].
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
  // Size of a part: units of four floats for each row, and its row max and sum.
  static constexpr int kUnitsPerRow = kDimV / 4;
  static constexpr int kPartBytes = kSplit ? kTileQ * (kUnitsPerRow * 16 + 8) : 0;
  // With a single stage of Q, it is released group by group.
  static constexpr int kQPortions = kQStages == 1 ? kConsumers : 1;
  static constexpr int kGroupsPerPortion = kConsumers / kQPortions;

  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = kQStages * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kOOffset = kVOffset + kStages * kVBytes;
  static constexpr int kTilesOffset = kOOffset + kOBytes;
  static constexpr int kTileSlots = kTilesInFlight + (kRagged ? kTilesAhead : 0);
  static constexpr int kTileSlotBytes = kRagged ? kRaggedTileBytes : kTileBytes;
  // Whether tiles hold groups of several heads, each of one (RaggedScheduler). With two consumers
  // it would save fewer groups without rows, and there is no room for one ring of tiles per
  // consumer.
  static constexpr bool kPacksHeads = kRagged && !kPacked && kConsumers > 2;
  static constexpr int kTileRings = kPacksHeads ? kConsumers : 1;
  static constexpr int kSequencesOffset = kTilesOffset + kTileRings * kTileSlots * kTileSlotBytes;
  static constexpr int kSequencesBytes = kRagged ? kSequencesPerChunk * kChunkSequenceBytes : 0;
  static constexpr int kBarriersOffset = kSequencesOffset + kSequencesBytes;
  // Barriers: K full, K empty, V full, V empty, Q full, Q empty, each for all stages; those of Q
  // for all portions of a stage. Ragged kernels also have tile full and empty, for all slots.
  static constexpr int kBarriers =
      4 * kStages + 2 * kQStages * kQPortions + (kRagged ? 2 * kTileSlots : 0);
  static constexpr int kSharedBytes = kBarriersOffset + 8 * kBarriers + kSharedAlignment;

  static_assert(kStepKeys % 16 == 0 && kKVBoxBytes % kSharedAlignment == 0);
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0);
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_90 block holds 227 KiB");
  static_assert(kQStages + (kQPortions > 1 ? 1 : 0) + 1 < kTilesInFlight);
  static_assert(!kRagged || (!kSplit && kStepKeys % kRowsPerGroup == 0));
  // Space in which a consumer warp keeps a chunk while it finds its tiles again
  // (Repair::repair_all).
  static_assert(!kRagged || 4 * kSequencesBytes <= kOBytesPerGroup);
  static_assert(kStepKeys <= 256, "a box has at most 256 rows");
};

}  // namespace flashmoe::sm90
