// Compile-time description of one sm_89 attention backward kernel: tiles, warps, stages, shared
// memory.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/pair_words.cuh"

namespace flashmoe::sm89_backward {

inline constexpr int kMostSharedBytesOfAda = 99 * 1024;  // sm_86, sm_89: 100 KiB minus 1 reserved
inline constexpr int kMostSharedBytesOfHopper = 227 * 1024;  // 228 KiB minus 1 reserved

// How the warps of a block divide a product: into parts of its rows, and of its columns.
struct Split {
  int rows;
  int columns;
};

// Choices per head dimension; docs/lab/attention_backward_sm89.md has the arithmetic behind the
// table.
struct Tuning {
  int warps;
  int tile_q;             // queries per step
  int tile_k;             // keys per item
  Split scores;           // of [tile_q, tile_k]: S and dP
  Split keys;             // of [tile_k, dim]: dV and dK
  Split queries;          // of [tile_q, dim]: dQ
  int stages;             // steps of Q in flight or in use: two
  int dout_stages;        // the same for dO: one or two
  int buffers;            // steps of P and dS at a time; with two, one barrier per step is enough
  int most_shared_bytes;  // per block, on the GPUs that it is for
  bool ragged = false;    // for ragged and padded batches
  bool biased = false;    // for calls with a bias or a mask
};

// For GPUs with 228 KiB per multiprocessor.
template <int kDim, int kDimV>
struct TableTuning {
  static constexpr Tuning value = [] {
    const int widest = larger(kDim, kDimV);
    if (widest <= 64) {
      return Tuning{8, 128, 128, {4, 2}, {4, 2}, {4, 2}, 2, 2, 2, kMostSharedBytesOfHopper};
    }
    if (widest <= 128) {
      return Tuning{8, 64, 128, {2, 4}, {4, 2}, {2, 4}, 2, 2, 2, kMostSharedBytesOfHopper};
    }
    return Tuning{8, 64, 64, {4, 2}, {2, 4}, {2, 4}, 2, 2, 2, kMostSharedBytesOfHopper};
  }();
};

// For the 100 KiB of Ada.
template <int kDim, int kDimV>
struct AdaTuning {
  static constexpr Tuning value = [] {
    const int widest = larger(kDim, kDimV);
    if (widest <= 64) {
      return Tuning{8, 64, 128, {2, 4}, {4, 2}, {2, 4}, 2, 2, 1, kMostSharedBytesOfAda};
    }
    if (widest <= 128) {
      return Tuning{8, 64, 64, {2, 4}, {2, 4}, {2, 4}, 2, 1, 1, kMostSharedBytesOfAda};
    }
    return Tuning{4, 32, 32, {2, 2}, {1, 4}, {1, 4}, 2, 1, 1, kMostSharedBytesOfAda};
  }();
};

// The same for ragged and padded batches.
template <int kDim, int kDimV, class TuningOf>
struct RaggedTuningOf {
  static constexpr Tuning value = [] {
    Tuning tuning = TuningOf::value;
    tuning.ragged = true;
    return tuning;
  }();
};
template <int kDim, int kDimV>
struct RaggedTuning : RaggedTuningOf<kDim, kDimV, TableTuning<kDim, kDimV>> {};
template <int kDim, int kDimV>
struct RaggedAdaTuning : RaggedTuningOf<kDim, kDimV, AdaTuning<kDim, kDimV>> {};

// The same for calls with a bias or a mask.
template <int kDim, int kDimV, class TuningOf>
struct BiasedTuningOf {
  static constexpr Tuning value = [] {
    Tuning tuning = TuningOf::value;
    tuning.biased = true;
    return tuning;
  }();
};
template <int kDim, int kDimV>
struct BiasedTuning : BiasedTuningOf<kDim, kDimV, TableTuning<kDim, kDimV>> {};
template <int kDim, int kDimV>
struct BiasedAdaTuning : BiasedTuningOf<kDim, kDimV, AdaTuning<kDim, kDimV>> {};

// The same for both.
template <int kDim, int kDimV>
struct RaggedBiasedAdaTuning : BiasedTuningOf<kDim, kDimV, RaggedAdaTuning<kDim, kDimV>> {};

template <class Element_, int kDim_, int kDimV_, class TuningOf = TableTuning<kDim_, kDimV_>>
struct Traits {
  static constexpr Tuning kTuning = TuningOf::value;
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr bool kRagged = kTuning.ragged;
  static constexpr bool kBiased = kTuning.biased;
  using DenseParams = std::conditional_t<kBiased, attention_backward::BiasedParams,
                                         attention_backward::CommonParams>;
  using SequenceParams = std::conditional_t<kBiased, attention_backward::RaggedBiasedParams,
                                            attention_backward::RaggedParams>;
  using Params = std::conditional_t<kRagged, SequenceParams, DenseParams>;
  using Item =
      std::conditional_t<kRagged, attention_backward::RaggedItem, attention_backward::Item>;
  static constexpr int kWarps = kTuning.warps;
  static constexpr int kThreads = kWarps * kThreadsPerWarp;
  static constexpr int kTileQ = kTuning.tile_q;
  static constexpr int kTileK = kTuning.tile_k;
  static constexpr int kPanels = 1;  // panels of a tile of dQ
  static constexpr int kStages = kTuning.stages;
  static constexpr int kDoutStages = kTuning.dout_stages;
  static constexpr int kBuffers = kTuning.buffers;
  static constexpr bool kPairsAhead = kBiased && kBuffers == 2;  // pairs.cuh

  static constexpr Split kScores = kTuning.scores;
  static constexpr Split kKeys = kTuning.keys;
  static constexpr Split kQueries = kTuning.queries;

  // A warp's part of each product.
  static constexpr int kScoreRows = kTileQ / kScores.rows;
  static constexpr int kScoreColumns = kTileK / kScores.columns;
  static constexpr int kKeyRows = kTileK / kKeys.rows;
  static constexpr int kKColumns = kDim / kKeys.columns;
  static constexpr int kVColumns = kDimV / kKeys.columns;
  static constexpr int kQueryRows = kTileQ / kQueries.rows;
  static constexpr int kQColumns = kDim / kQueries.columns;

  // The order of a tile's keys and values, and of their gradients.
  using KeyOrder =
      std::conditional_t<kBiased, SideBySide<kScoreColumns % 32 == 0 ? 8 : 4>, InOrder>;

  using QLayout = TileLayout<kDim>;
  using KLayout = TileLayout<kDim>;
  using DoutLayout = TileLayout<kDimV>;
  using VLayout = TileLayout<kDimV>;
  using ScoreLayout = TileLayout<kTileK>;  // of P and dS: [kTileQ, kTileK]

  // [K][V][stages of Q][stages of dO][buffers of P][buffers of dS][lse][delta][items][barriers]
  static constexpr int kKBytes = kTileK * KLayout::kRowBytes;
  static constexpr int kVBytes = kTileK * VLayout::kRowBytes;
  static constexpr int kQBytes = kTileQ * QLayout::kRowBytes;
  static constexpr int kDoutBytes = kTileQ * DoutLayout::kRowBytes;
  static constexpr int kScoreBytes = kTileQ * ScoreLayout::kRowBytes;
  static constexpr int kRowBytes = kTileQ * static_cast<int>(sizeof(float));
  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + kKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
  static constexpr int kPOffset = kDoutOffset + kDoutStages * kDoutBytes;
  static constexpr int kDsOffset = kPOffset + kBuffers * kScoreBytes;
  static constexpr int kLseOffset = kDsOffset + kBuffers * kScoreBytes;
  static constexpr int kDeltaOffset = kLseOffset + kStages * kRowBytes;
  static constexpr int kItemOffset = kDeltaOffset + kDoutStages * kRowBytes;
  static constexpr int kItemBytes = static_cast<int>(sizeof(Item));
  static constexpr int kBarriers = 2 + kStages + kDoutStages;
  // Slots for the current item, the next one, and the previous one, which slow warps may still be
  // writing.
  static constexpr int kItems = 4;
  static constexpr int kBarrierOffset = kItemOffset + kItems * kItemBytes;
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8;
  static_assert(kSharedBytes <= kTuning.most_shared_bytes);

  static_assert(kScores.rows * kScores.columns == kWarps && kKeys.rows * kKeys.columns == kWarps &&
                kQueries.rows * kQueries.columns == kWarps);
  static_assert(kScoreRows % 16 == 0 && kScoreColumns % 16 == 0 && kKeyRows % 16 == 0 &&
                    kKColumns % 16 == 0 && kVColumns % 16 == 0 && kQueryRows % 16 == 0 &&
                    kQColumns % 16 == 0,
                "fragments are of 16 rows and of 16 columns");
  // A warp's columns must begin where TileLayout::fragment can count from.
  static constexpr bool is_aligned(int columns, int tile_columns) {
    return columns % 64 == 0 || tile_columns % 64 != 0 || 64 % columns == 0;
  }
  static_assert(is_aligned(kScoreColumns, kTileK) && is_aligned(kKeyRows, kTileK) &&
                is_aligned(kKColumns, kDim) && is_aligned(kVColumns, kDimV) &&
                is_aligned(kQColumns, kDim));
  static_assert(kStages == 2 && (kDoutStages == 1 || kDoutStages == 2) &&
                (kBuffers == 1 || kBuffers == 2));
};

}  // namespace flashmoe::sm89_backward
