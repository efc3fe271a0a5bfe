// Compile-time description of one sm_90 attention backward kernel: tile, roles, stages, shared
// memory.
#pragma once

#include <type_traits>

#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::sm90_backward {

inline constexpr int kMaxSharedBytesPerBlock = 227 * 1024;
inline constexpr int kBoxColumns = 64;  // 128 bytes, the widest swizzle
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kSharedAlignment = 1024;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kKeysPerGroup = 64;
// Slots for what leaves for global memory. Each has a writer warp.
inline constexpr int kSlots = 2;
// Items in shared memory. docs/kernels/attention_backward_sm90_barriers.md says why there are so
// many.
inline constexpr int kItemsHeld = 4;
inline constexpr int kStageWordBytes = 4;

// How the work of a block is divided among its consumers.
enum class Share {
  kKeys,           // each has 64 keys of a tile of 128: all their products, and half of dQ
  kKeysAndPanels,  // the same, but alternate panels of 64 columns of dQ
  // Two blocks share a tile of 128 keys. A block has 64 of them, and of these one consumer has P
  // and dV, one dS and dK; a third consumer has dQ.
  kProducts,
};

struct Tuning {
  int tile_q;  // queries of a step
  int stages;  // steps of Q in flight or in use
  int dout_stages;
  Share share;
  bool capped = false;  // logits have a softcap
  int dout_units = 1;   // units of a step's dO; `dout_stages` counts them
  bool ragged = false;  // ragged and padded batches, of sequences
};

// A softcap needs fp32 factors beside P. There are no registers for those of 128 queries.
constexpr Tuning tuning(int dim, int dim_v, bool capped) {
  if (dim <= 64 && dim_v <= 64) {
    return capped ? Tuning{64, 4, 4, Share::kKeys, true} : Tuning{128, 2, 2, Share::kKeys, false};
  }
  if (dim <= 128 && dim_v <= 128) return {64, 2, 2, Share::kKeys, capped};
  if (dim <= 192 && dim_v <= 128) return {64, 2, 2, Share::kKeysAndPanels, capped};
  if (dim <= 192 && dim_v <= 192) return {64, 2, 2, Share::kProducts, capped};
  return {64, 2, 3, Share::kProducts, capped, 2};
}

template <int kDim, int kDimV>
struct TableTuning {
  static constexpr Tuning value = tuning(kDim, kDimV, false);
  using Uncapped = TableTuning;
};

template <int kDim, int kDimV>
struct CappedTuning {
  static constexpr Tuning value = tuning(kDim, kDimV, true);
  using Uncapped = TableTuning<kDim, kDimV>;
};

template <int kDim, int kDimV, bool kCapped>
struct RaggedTuningOf {
  static constexpr Tuning value = [] {
    Tuning made = tuning(kDim, kDimV, kCapped);
    made.ragged = true;
    return made;
  }();
};
template <int kDim, int kDimV>
struct RaggedTuning : RaggedTuningOf<kDim, kDimV, false> {
  using Uncapped = RaggedTuning;
};
template <int kDim, int kDimV>
struct CappedRaggedTuning : RaggedTuningOf<kDim, kDimV, true> {
  using Uncapped = RaggedTuning<kDim, kDimV>;
};

template <class Element_, int kDim_, int kDimV_, class TuningOf = TableTuning<kDim_, kDimV_>>
struct Traits {
  static constexpr Tuning kTuning = TuningOf::value;
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kTileQ = kTuning.tile_q;
  static constexpr int kStages = kTuning.stages;
  static constexpr int kDoStages = kTuning.dout_stages;
  static constexpr bool kCapped = kTuning.capped;
  static constexpr bool kRagged = kTuning.ragged;
  static constexpr int kItemBytes = kRagged ? 64 : 32;
  static constexpr bool kInPanels = kTuning.share != Share::kKeys;
  static constexpr bool kByProducts = kTuning.share == Share::kProducts;
  static constexpr int kConsumerGroups = kByProducts ? 3 : kConsumers;
  static constexpr int kThreads = (kConsumerGroups + 1) * kThreadsPerGroup;
  static constexpr int kTileK = 2 * kKeysPerGroup;
  // The blocks of a cluster share an item. Each has some of the keys, and a share of the columns of
  // dQ.
  static constexpr int kCluster = kByProducts ? 2 : 1;
  static constexpr int kBlockKeys = kTileK / kCluster;
  // The prologue, and the kernel that follows this one, are those of these traits. Both know tiles,
  // but no softcap.
  using Around =
      std::conditional_t<TuningOf::Uncapped::value.tile_q == kTileQ,
                         Traits<Element, kDim, kDimV, typename TuningOf::Uncapped>, Traits>;
  // With this many query heads to a KV head, items run in waves (cuda/attention/backward/tile.cuh).
  // 0 means that waves gain nothing.
  static constexpr int kWaveHeads = kDim > 64 && !kByProducts ? 8 : 0;
  // By products dO is given back before dS is made, so delta comes with Q.
  static constexpr bool kDeltaWithQ = kByProducts;
  static constexpr int kDeltaStages = kDeltaWithQ ? kStages : kDoStages;
  // dS is made of P as it was rounded for dV, and takes over the registers of P: there is no room
  // for P in fp32. With a softcap, dS is made of P times what the cap leaves, rounded likewise.
  static constexpr bool kUnpacksP = kTileQ == 128 || kInPanels;
  // Pairs of rounded P are multiplied as they are by dP - delta, rounded too, where the type has
  // the range of fp32.
  static constexpr bool kMultipliesPairs =
      kUnpacksP && numeric::ElementTraits<Element>::kDtype == Dtype::kBFloat16;
  // These scores of a thread have their exponentials under dQ of the step before. The others have
  // them under dP.
  static constexpr int kEarlyPowers = kTileQ == 128 ? kTileQ / 4 : kTileQ / 2;
  static_assert(kTileQ == 64 || kTileQ == 128);
  static_assert(!(kTileQ == 128 && (kInPanels || kCapped)), "there are no registers for it");
  static_assert(!(kRagged && kInPanels), "kernels of panels read no sequences");

  // setmaxnreg shares out what the block has from its launch: 168 registers for each thread of 384
  // (64 Ki / 384, in eights), or 128 for each of 512.
  static constexpr int kLaunchRegisters = kByProducts ? 128 : 168;
  static constexpr int kConsumerRegisters = kByProducts ? 192 : 240;
  static constexpr int kKeyRegisters = 200;   // by products: those of the consumer of dS and dK
  static constexpr int kQueryRegisters = 96;  // by products: those of the consumer of dQ
  static constexpr int kAllConsumerRegisters =
      kByProducts ? kConsumerRegisters + kKeyRegisters + kQueryRegisters
                  : kConsumers * kConsumerRegisters;
  static constexpr int kProducerRegisters =
      (kConsumerGroups + 1) * kLaunchRegisters - kAllConsumerRegisters;

  // dQ of a step goes to global memory as a whole, or in panels of 64 columns. By products, a
  // block's half is one panel where it lies in whole boxes; otherwise its panels have 32 columns.
  static constexpr int kPanelColumns = kByProducts ? (kDim % (2 * kBoxColumns) == 0 ? kDim / 2 : 32)
                                       : kInPanels ? kBoxColumns
                                                   : kDim;
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kBlockPanels = kPanels / kCluster;  // a block's share
  static_assert(!kInPanels || (kDim % kBoxColumns == 0 && kDimV % kBoxColumns == 0));
  // Where dQ goes as a whole, each consumer has 64 of its rows with 128 queries, and half of its
  // columns with 64.
  static constexpr bool kSplitsColumns = !kInPanels && kTileQ == 64;
  static constexpr int kDqColumns = kSplitsColumns ? kDim / 2 : kPanelColumns;
  static constexpr bool kSharesDqBox = kDqColumns < kBoxColumns;
  static constexpr int kDqRegisters = kDqColumns / 2;
  static_assert(!kSplitsColumns || kDim % 128 == 0 || kDim == 64,
                "a consumer's half of the columns lies in whole boxes or in one");

  // Tiles are boxes of 64 columns side by side: K and V [dim / 64][keys][64], Q and dO
  // [dim / 64][queries][64], dS [queries / 64][keys][64].
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  static constexpr int kBoxesV = ceil_div(kDimV, kBoxColumns);
  static constexpr int kKeyBoxBytes = kBlockKeys * kBoxRowBytes;
  static constexpr int kGroupBoxBytes = kKeysPerGroup * kBoxRowBytes;  // for a consumer's keys
  static constexpr int kQueryBoxBytes = kTileQ * kBoxRowBytes;
  static constexpr int kKBytes = kBoxes * kKeyBoxBytes;
  static constexpr int kVBytes = kBoxesV * kKeyBoxBytes;
  // The boxes of the other block's K that this block's columns of dQ take, from `rank * kBoxes / 2`
  // on.
  static constexpr int kOtherBoxes = kCluster > 1 ? ceil_div(kBoxes, 2) : 0;
  static constexpr int kOtherKBytes = kOtherBoxes * kKeyBoxBytes;
  static constexpr int kQBytes = kBoxes * kQueryBoxBytes;
  static constexpr int kDoBytes = kBoxesV * kQueryBoxBytes;
  static constexpr int kDoUnits = kTuning.dout_units;
  static constexpr int kDoUnitBytes = kDoBytes / kDoUnits;
  static_assert(kBoxesV % kDoUnits == 0);
  static constexpr int kRowBytes = kTileQ * 4;  // a number for each query
  static constexpr int kDsBytes = kTileQ / 64 * kTileK * kBoxRowBytes;
  // A slot holds a part of dQ in fp32, dK, or dV. Where each consumer has a slot of its own, dK and
  // dV of 64 keys go through it a few boxes at a time. By products everything leaves from
  // registers.
  static constexpr int kDqBytes = kTileQ * kPanelColumns * 4;
  static constexpr int kDqBytesPerGroup = kDqBytes / kConsumers;
  static constexpr int kSlotBytes = kByProducts ? 0
                                    : kInPanels ? kDqBytes
                                                : larger(kDqBytes, larger(kKBytes, kVBytes));
  static constexpr int kSlotBoxes = kSlotBytes / kGroupBoxBytes;
  // A warp decides alone to add or to withhold this many columns of dQ, and of dK and dV.
  static constexpr int kDqPieces = kByProducts && kPanelColumns > kBoxColumns ? 2 : 1;
  static constexpr int kDqPartColumns = kDqColumns / kDqPieces;
  static constexpr int kDqParts = kDim / kDqPartColumns;
  static constexpr int kKeyPartColumns =
      kInPanels && !kByProducts ? kSlotBoxes * kBoxColumns : larger(kDim, kDimV);
  static constexpr int kKeyParts = ceil_div(larger(kDim, kDimV), kKeyPartColumns);
  static constexpr int kSplitFloats = kInPanels || kRagged ? 0 : kTileK * (kDim + kDimV);
  static constexpr int kSlotWordBytes = kInPanels ? 16 : 8;

  static constexpr int kKOffset = 0;
  static constexpr int kOtherKOffset = kKOffset + kKBytes;
  static constexpr int kVOffset = kOtherKOffset + kOtherKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kDoOffset = kQOffset + kStages * kQBytes;
  static constexpr int kDsOffset = kDoOffset + kDoStages * kDoUnitBytes;
  static constexpr int kSlotOffset = kDsOffset + 2 * kDsBytes;
  static constexpr int kLseOffset = kSlotOffset + kSlots * kSlotBytes;
  static constexpr int kDeltaOffset = kLseOffset + kStages * kRowBytes;
  static constexpr int kItemOffset = kDeltaOffset + kDeltaStages * kRowBytes;
  static constexpr int kBarriersOffset = kItemOffset + kItemsHeld * kItemBytes;
  static constexpr int kBarriers = (kByProducts ? 12
                                    : kInPanels ? 8
                                                : 6) +
                                   2 * kStages + 2 * kDoStages + 2 * kSlots;
  static constexpr int kSharedBytes =
      kBarriersOffset + 8 * kBarriers + kSlotWordBytes * kSlots + kStageWordBytes * kStages;
  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock);
};

}  // namespace flashmoe::sm90_backward
