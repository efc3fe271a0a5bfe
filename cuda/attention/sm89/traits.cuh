// Compile-time description of one sm_89 attention kernel: tile, warps, stages, shared memory.
#pragma once

#include <type_traits>

#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/pair_words.cuh"

namespace flashmoe::sm89 {

inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB minus 1 reserved
inline constexpr int kTileInfoBytes = 16;                  // a Tile in shared memory
inline constexpr int kRaggedTileInfoBytes = 96;            // a RaggedTile

// What a warp owns (split_q.cuh and split_dim_v.cuh).
enum class Scheme { kSplitQ, kSplitDimV };

// Choices per head dimension; docs/kernels/attention_sm89.md has the measurements behind the table.
struct Tuning {
  Scheme scheme;
  int warps;
  int row_atoms;        // 16-row fragments of a warp's scores
  int step_keys;        // keys per step of the main loop
  int stages;           // steps of K and V in flight or in use; 1 with kSplitDimV
  int q_register_dims;  // leading dimensions of Q in registers; others are read every step
  int ahead_fragments;  // K and V fragments read before their products
  int blocks_per_sm;    // target of the register allocation
};

constexpr Tuning tuning(int dim, int dim_v) {
  const int widest = dim > dim_v ? dim : dim_v;
  if (widest <= 32) return {Scheme::kSplitQ, 4, 2, 64, 3, 32, 1, 3};
  if (widest <= 64) return {Scheme::kSplitQ, 4, 2, 64, 2, 64, 1, 2};
  if (widest <= 96) return {Scheme::kSplitQ, 4, 2, 48, 2, 64, 1, 2};
  if (widest <= 128) return {Scheme::kSplitQ, 4, 2, 48, 2, 0, 1, 2};
  return {Scheme::kSplitDimV, 4, 1, 64, 1, 64, 4, 2};
}

template <int kDim, int kDimV>
struct TableTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
  static constexpr bool kRagged = false;
  static constexpr bool kBiased = false;
};

// The same for ragged, padded and paged batches. They have kernels of their own, so that dense
// tiles need not keep the additional state.
template <int kDim, int kDimV>
struct RaggedTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
  static constexpr bool kRagged = true;
  static constexpr bool kBiased = false;
};

// For calls with a bias or a mask of pairs: other kernels have no room for these.
template <int kDim, int kDimV>
struct BiasedTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
  static constexpr bool kRagged = false;
  static constexpr bool kBiased = true;
};

// For both.
template <int kDim, int kDimV>
struct RaggedBiasedTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
  static constexpr bool kRagged = true;
  static constexpr bool kBiased = true;
};

// For GPUs whose multiprocessors lack shared memory for two blocks of the table's kernel, such as
// Ada with its 100 KiB: one block of eight warps.
template <int kDim, int kDimV>
struct EightWarpTuning {
  static_assert(kDim == 128 && kDimV == 128);
  static constexpr Tuning value = {Scheme::kSplitQ, 8, 2, 32, 2, 32, 1, 1};
  static constexpr bool kRagged = false;
  static constexpr bool kBiased = false;
};

// Traits that both schemes share.
template <class Element_, int kDim_, int kDimV_, class TuningOf>
struct CommonTraits {
  static constexpr Tuning kTuning = TuningOf::value;
  static constexpr bool kRagged = TuningOf::kRagged;
  static constexpr bool kBiased = TuningOf::kBiased;
  static constexpr int kInfoBytes = kRagged ? kRaggedTileInfoBytes : kTileInfoBytes;
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr Scheme kScheme = kTuning.scheme;
  static constexpr int kWarps = kTuning.warps;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kRowAtoms = kTuning.row_atoms;
  static constexpr int kRowsPerWarp = 16 * kRowAtoms;
  static constexpr int kTileQ = kWarps * kRowsPerWarp;
  static constexpr int kStepKeys = kTuning.step_keys;
  static constexpr int kStages = kTuning.stages;
  static constexpr int kQRegisterDims = kTuning.q_register_dims;
  static constexpr int kQSharedDims = kDim - kQRegisterDims;
  static constexpr int kAheadFragments = kTuning.ahead_fragments;
  static constexpr int kBlocksPerSm = kTuning.blocks_per_sm;

  // Q in two tiles: one that moves to registers, and one that stays. An absent one has a nominal
  // layout.
  using QRegisterLayout = TileLayout<larger(kQRegisterDims, 32)>;
  using QSharedLayout = TileLayout<larger(kQSharedDims, 32)>;
  // The layout of a tile of keys and values.
  using KeyOrder = std::conditional_t<kBiased, SideBySide<kStepKeys % 32 == 0 ? 8 : 4>, InOrder>;
  using KLayout = TileLayout<kDim>;
  using VLayout = TileLayout<kDimV>;
  using OLayout = TileLayout<kDimV>;
  static constexpr int kQRegisterBytes = kTileQ * kQRegisterDims * 2;
  static constexpr int kQSharedBytes = kTileQ * kQSharedDims * 2;
  static constexpr int kKBytes = kStepKeys * KLayout::kRowBytes;
  static constexpr int kVBytes = kStepKeys * VLayout::kRowBytes;
  static constexpr int kOBytes = kTileQ * OLayout::kRowBytes;
  // A warp's numbers of a bias or a mask for a step (pairs.cuh).
  static constexpr int kPairBytesOfWarp = kRowsPerWarp * kStepKeys * 2;

  static_assert(kStepKeys % 16 == 0 && kRowAtoms >= 1 && kThreads <= 1024);
};

template <class Element_, int kDim_, int kDimV_, class TuningOf = TableTuning<kDim_, kDimV_>,
          Scheme kScheme_ = TuningOf::value.scheme>
struct Traits;

template <class Element_, int kDim_, int kDimV_, class TuningOf>
struct Traits<Element_, kDim_, kDimV_, TuningOf, Scheme::kSplitQ>
    : CommonTraits<Element_, kDim_, kDimV_, TuningOf> {
  using Common = CommonTraits<Element_, kDim_, kDimV_, TuningOf>;
  using Common::kKBytes;
  using Common::kOBytes;
  using Common::kQRegisterBytes;
  using Common::kQSharedBytes;
  using Common::kStages;
  using Common::kVBytes;

  // Stages of [K][V], then the part of Q that stays, and numbers of pairs. The part of Q that moves
  // to registers overlaps the last stages, and the output the first ones.
  static constexpr int kStageBytes = kKBytes + kVBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kTileBytes = larger(kRingBytes, kQRegisterBytes);
  static constexpr int kQRegisterOffset = kTileBytes - kQRegisterBytes;
  static constexpr int kQSharedOffset = kTileBytes;
  static constexpr int kPairsOffset = kTileBytes + kQSharedBytes;
  static constexpr int kPairBytes = Common::kBiased ? Common::kWarps * Common::kPairBytesOfWarp : 0;
  static constexpr int kTileInfoOffset = larger(kPairsOffset + kPairBytes, kOBytes);
  static constexpr int kSharedBytes = kTileInfoOffset + Common::kInfoBytes;
  // Steps that may be loaded while Q is still read: their stages do not overlap it.
  static constexpr int kEarlySteps = smaller(kQRegisterOffset / kStageBytes, kStages - 1);

  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kStages >= 2, "one stage is filled while another is read");
  static_assert(kStages == 2 || !Common::kBiased, "pairs of a step are waited for ahead of it");
};

template <class Element_, int kDim_, int kDimV_, class TuningOf>
struct Traits<Element_, kDim_, kDimV_, TuningOf, Scheme::kSplitDimV>
    : CommonTraits<Element_, kDim_, kDimV_, TuningOf> {
  using Common = CommonTraits<Element_, kDim_, kDimV_, TuningOf>;
  using Common::kKBytes;
  using Common::kOBytes;
  using Common::kQRegisterBytes;
  using Common::kQSharedBytes;
  using Common::kTileQ;
  using Common::kVBytes;

  static constexpr int kColumnsPerWarp = kDimV_ / Common::kWarps;
  using PLayout = TileLayout<Common::kStepKeys>;
  static constexpr int kPBytes = kTileQ * PLayout::kRowBytes;

  // [K][V][P][Q that stays][factors]. The part of Q that moves to registers overlaps P, and the
  // output overlaps K and V. A warp's numbers of pairs overlap its own part of P.
  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKBytes;
  static constexpr int kPOffset = kVOffset + kVBytes;
  static constexpr int kPairsOffset = kPOffset;
  static constexpr int kQRegisterOffset = kPOffset;
  static constexpr int kQSharedOffset = kPOffset + kPBytes;
  static constexpr int kFactorsOffset = kQSharedOffset + kQSharedBytes;
  static constexpr int kTileInfoOffset = kFactorsOffset + kTileQ * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kTileInfoOffset + Common::kInfoBytes;

  static_assert(kSharedBytes <= kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kOBytes <= kFactorsOffset, "the factors outlive the tiles");
  static_assert(Common::kRowAtoms == 1 && Common::kStages == 1);
  static_assert(kQRegisterBytes <= kPBytes, "Q gives way to the first probabilities");
  static_assert(Common::kPairBytesOfWarp == Common::kRowsPerWarp * PLayout::kRowBytes);
  static_assert(kDimV_ % (16 * Common::kWarps) == 0, "a fragment of V has 16 columns");
  static_assert(2 * Common::kWarps == Common::VLayout::kSwizzleChunks,
                "a warp's fragments of V are whole swizzle groups apart");
};

}  // namespace flashmoe::sm89
