// Constants of the few-token kernels. The plan, the launch and the device code have no other
// source.
#pragma once

#include <cstdint>

#include "cuda/moe/sm89_few_tokens/params.h"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89_few_tokens {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * kThreadsPerWarp;
inline constexpr int kMaxStages = 6;
inline constexpr int kPieceBytes = kThreadsPerWarp * 16;  // bytes of one load of a warp

inline constexpr int kRecordBytes = 16;

// A warp's products: kTiles products of 16 weight rows by up to kTokenBlocks times 8 tokens.
template <class Element_, int kTiles_, int kTokenBlocks_>
struct Traits {
  using Element = Element_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenBlocks;

  static constexpr int kChunks = 2;  // 16-byte chunks of a row per lane and step
  static constexpr int kStepColumns = 32 * kChunks;
  static constexpr int kWeightPieces = kTiles * 2 * kChunks;
  static constexpr int kSums = kTiles * kTokenBlocks * 4;         // per lane
  static constexpr int kHeadBytes = kSums * kThreadsPerWarp * 4;  // per warp
  static constexpr int kStripeRows = 16 * kTiles;                 // of the down kernel

  // A stage of a warp: pieces of weights, and rows of so many tokens.
  static __host__ __device__ constexpr int stage_bytes(int entry_tokens) {
    return kWeightPieces * kPieceBytes + entry_tokens * kStepColumns * 2;
  }

  // Shared memory in order: pipelines, heads of tiles (up) or sums (down), records, slots.
  static constexpr int up_shared_bytes(int stages, int entry_tokens, int records, int pairs) {
    return kWarps * (stages * stage_bytes(entry_tokens) + kHeadBytes) +
           (records + 1) * kRecordBytes + pairs * 4;
  }
  static constexpr int down_shared_bytes(int stages, int entry_tokens, int records, int pairs,
                                         int tokens) {
    return kWarps * (stages * stage_bytes(entry_tokens) + tokens * kStripeRows * 4) +
           (records + 1) * kRecordBytes + pairs * 8;
  }
};

}  // namespace flashmoe::moe::sm89_few_tokens
