// Constants of the MLA kernel.
#pragma once

#include "cuda/attention/decode/stream_k.cuh"
#include "cuda/attention/sm90_mla/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"

namespace flashmoe::sm90_mla {

// Cost of ending a tile and beginning the next, in blocks of keys.
inline constexpr int kLead = 1;

// A block's part of a tile, from `key` on.
struct alignas(16) Segment {
  attention_decode::TileRows tile;
  int32_t exists;
  int32_t key;        // the first key of the first block of keys
  int32_t blocks;     // blocks of keys, at least 1
  int32_t all_first;  // keys that all rows see
  int32_t all_end;
  int32_t whole;  // all keys of the tile are here
  int32_t place;  // otherwise, the place of its part
};

struct Described : attention_decode::DescribedSequence {
  int32_t units;  // blocks of keys; 0: it has no such row tile

  __device__ __forceinline__ int origin() const { return first / kBlockKeys * kBlockKeys; }
  __device__ __forceinline__ int64_t weight() const { return units == 0 ? 0 : kLead + units; }
};

// The range of a block, in units of a block of keys.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t first_unit;  // of `sequence`
  int32_t sequence;
  int32_t last;  // the range with the end of the sequence that continues after this range
};

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = (kConsumers + 1) * kThreadsPerGroup;
inline constexpr int kConsumerThreads = kConsumers * kThreadsPerGroup;
inline constexpr int kWarps = kThreads / kThreadsPerWarp;
inline constexpr int kBuffers = 2;  // of a block of keys
inline constexpr int kSegments = 2;
inline constexpr int kQueryWarps =
    2;  // of the producer: those behind the ones of keys and segments
inline constexpr int kQueryThreads = kQueryWarps * kThreadsPerWarp;

// Sequences that are described at a time: all of a call, or those of a warp.
inline constexpr int kWindow = 128;

template <class Element_>
struct Traits {
  using Element = Element_;
  static constexpr int kDim = 576;
  static constexpr int kDimV = 512;
  static constexpr int kHalf = kDimV / kConsumers;  // output columns per consumer

  // Boxes of 64 columns, one after another: [dim / 64][rows][64].
  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxRowBytes = 128;
  static constexpr int kBoxes = kDim / kBoxColumns;
  static constexpr int kBoxesOfHalf = kHalf / kBoxColumns;
  static constexpr int kBoxBytes = kBlockKeys * kBoxRowBytes;
  static constexpr int kBlockBytes = kBoxes * kBoxBytes;

  // The box after those of the values is no longer needed when a block's scores are ready.
  // Probabilities replace it.
  static constexpr int kSpareBox = kDimV / kBoxColumns;

  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kUnitsPerRow = kDimV / 4;  // per row of a part

  // Data about the sequence that a thread describes.
  struct Finding {
    uint32_t before[kThreads];  // units before it
    int32_t nearest[kThreads];  // the range that begins nearest to it, if all are equal
    uint32_t begins[kThreads];  // where a thread's range begins, with the maximum number of pieces
  };
  // Data that consumers exchange.
  struct Told {
    float2 row_maxima[kBuffers][kThreadsPerGroup];
    float2 row_sums[kConsumers][kThreadsPerGroup];
  };
  struct State {
    Segment segments[kSegments];
    Range range;
    Described window[kWindow];
    int64_t warp_units[kWarps];
    uint32_t longest;          // longest range, with the maximum number of pieces
    uint64_t valid[kBuffers];  // one bit per key of a block
    union {
      Finding finding;  // until ranges are found
      Told told;
    };
    uint32_t again[kRows / 32];  // one bit per row to recompute
    uint64_t full[kBuffers][kBoxes];
    uint64_t empty[kBuffers][kConsumers];  // signals that a consumer has read the values
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t segment_full[kSegments];
    uint64_t segment_empty[kSegments];
  };

  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = kRows * kBoxes * kBoxRowBytes;
  static constexpr int kStateOffset = kKOffset + kBuffers * kBlockBytes;
  static constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(State));

  static_assert(kDim % kBoxColumns == 0 && kDimV % kBoxColumns == 0 && kSpareBox < kBoxes);
  static_assert(kRows == kBlockKeys, "a box of probabilities is as large as one of keys");
  static_assert(kSharedBytes <= 227 * 1024, "an sm_90 block holds 227 KiB");
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                64 * 1024 / kThreadsPerGroup);
};

}  // namespace flashmoe::sm90_mla
