// Compile-time description of one sm_89 attention kernel: tile, warps, stages, shared memory.
#pragma once

#include "cuda/numeric/dtype.cuh"

namespace flashmoe::sm89 {

inline constexpr int kThreadsPerWarp = 32;
inline constexpr int kMaxSharedBytesPerBlock = 99 * 1024;  // sm_86, sm_89: 100 KiB less 1 reserved
inline constexpr int kBytesPerChunk = 16;                  // one cp.async, one ldmatrix row
inline constexpr int kElementsPerChunk = 8;

// The choices that differ from one head dimension to the next; docs/kernels/attention_sm89.md has
// the measurements behind the table.
struct Tuning {
  int warps;
  int row_atoms;       // 16-row fragments of a warp: 2 halves the shared-memory traffic of 1
  int step_keys;       // keys of one step of the main loop
  int stages;          // steps of K and V in flight or in use
  bool q_in_registers; // else read from shared memory at every step
  int ahead_fragments; // K and V fragments read before their products
  int blocks_per_sm;   // what the register allocation aims at
};

constexpr Tuning tuning(int dim, int dim_v) {
  const int widest = dim > dim_v ? dim : dim_v;
  if (widest <= 64) return {4, 2, 64, 3, true, 1, 2};
  if (widest <= 128) return {4, 2, 32, 3, true, 1, 2};
  return {8, 1, 32, 3, true, 2, 1};
}

template <int kDim, int kDimV>
struct TableTuning {
  static constexpr Tuning value = tuning(kDim, kDimV);
};

// A [rows, kDim] tile of 16-bit elements in shared memory. The 16-byte chunks of a row are permuted
// so that the eight rows of an 8x8 matrix lie in distinct banks, for any row length that is a
// multiple of 64 bytes.
template <int kDim>
struct TileLayout {
  static_assert(kDim % 32 == 0, "rows are multiples of 64 bytes");
  static constexpr int kChunksPerRow = kDim / kElementsPerChunk;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr bool kWide = kRowBytes % 128 == 0;
  static constexpr int kSwizzleChunks = kWide ? 8 : 4;

  static __device__ __forceinline__ uint32_t swizzle(int row) {
    return static_cast<uint32_t>(kWide ? row & 7 : (row >> 1) & 3);
  }
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes) +
           (static_cast<uint32_t>(chunk) ^ swizzle(row)) * kBytesPerChunk;
  }
  // ldmatrix addresses of one lane: `fragment_base` once, then `fragment` per 16-element column
  // pair. 2 * pair has its low bit clear and rows step by multiples of 8, so the swizzle is one
  // exclusive or with a constant.
  static __device__ __forceinline__ uint32_t fragment_base(uint32_t tile, int row, int half) {
    return tile + chunk_offset(row, half);
  }
  static __device__ __forceinline__ uint32_t fragment(uint32_t base, int row, int pair) {
    constexpr int kPairs = kSwizzleChunks / 2;
    return (base ^ static_cast<uint32_t>((pair % kPairs) * 2 * kBytesPerChunk)) +
           static_cast<uint32_t>((pair / kPairs) * kSwizzleChunks * kBytesPerChunk +
                                 row * kRowBytes);
  }
};

template <class Element_, int kDim_, int kDimV_, class TuningOf = TableTuning<kDim_, kDimV_>>
struct Traits {
  static constexpr Tuning kTuning = TuningOf::value;
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kWarps = kTuning.warps;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kRowAtoms = kTuning.row_atoms;
  static constexpr int kRowsPerWarp = 16 * kRowAtoms;
  static constexpr int kTileQ = kWarps * kRowsPerWarp;
  static constexpr int kStepKeys = kTuning.step_keys;
  static constexpr int kStages = kTuning.stages;
  static constexpr bool kQInRegisters = kTuning.q_in_registers;
  static constexpr int kAheadFragments = kTuning.ahead_fragments;
  static constexpr int kBlocksPerSm = kTuning.blocks_per_sm;

  using QLayout = TileLayout<kDim>;
  using KLayout = TileLayout<kDim>;
  using VLayout = TileLayout<kDimV>;
  using OLayout = TileLayout<kDimV>;

  // Stages of [K][V], then Q. A Q that moves to registers lies over the last stages, and the output
  // over the first.
  static constexpr int kKBytes = kStepKeys * KLayout::kRowBytes;
  static constexpr int kVBytes = kStepKeys * VLayout::kRowBytes;
  static constexpr int kStageBytes = kKBytes + kVBytes;
  static constexpr int kQBytes = kTileQ * QLayout::kRowBytes;
  static constexpr int kOBytes = kTileQ * OLayout::kRowBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kTileBytes = kQInRegisters
                                        ? (kRingBytes > kQBytes ? kRingBytes : kQBytes)
                                        : kRingBytes + kQBytes;
  static constexpr int kQOffset = kTileBytes - kQBytes;
  static constexpr int kSharedBytes = kTileBytes > kOBytes ? kTileBytes : kOBytes;
  // Steps that may be loaded while Q is still read, because their stages do not lie under it.
  static constexpr int kFreeStages = kQInRegisters ? kQOffset / kStageBytes : kStages;
  static constexpr int kEarlySteps = kFreeStages < kStages - 1 ? kFreeStages : kStages - 1;

  static_assert(kSharedBytes <= 2*kMaxSharedBytesPerBlock, "an sm_89 block holds 99 KiB");
  static_assert(kStepKeys % 16 == 0 && kStages >= 2 && kRowAtoms >= 1);
  static_assert(kThreads <= 1024);
};

}  // namespace flashmoe::sm89
