// Constants of the decoding kernels: the fragments and steps of the few-row kernels
// (few_rows/traits.cuh), and the shared memory of blocks that go from tile to tile.
#pragma once

#include "cuda/attention/decode/stream_k.cuh"
#include "cuda/attention/few_rows/traits.cuh"
#include "cuda/attention/sm89_decode/params.h"

namespace flashmoe::sm89_decode {

struct alignas(16) Described : attention_decode::DescribedSequence {
  int32_t unit_keys;  // keys per unit: a step, or a chunk
  int32_t origin;     // the key from which units are counted
  int32_t units;      // per tile; at least 1, since its rows must be written
  int32_t row_tiles;  // per KV head; 0: no queries
};

// What warps look up at every step, with one read of shared memory.
struct alignas(16) SegmentKeys {
  const int32_t* pages;  // nullptr: keys are in rows of batch_k
  int32_t batch_k;
  int32_t begin_k;
  int32_t key;         // where steps begin
  int32_t end;         // after the last key that some row sees; kNoKeys if there is no segment
  int32_t first;       // the first key that some row sees
  int32_t first_warp;  // of those of a KV head, the one that takes the first step
};

// An end before every step.
inline constexpr int32_t kNoKeys = -0x7fffffff - 1;

// Keys of a tile that a block takes at a time: all of its keys there, or a chunk.
struct Segment {
  SegmentKeys keys;
  TileRows tile;
  int32_t all_first;  // keys that all rows see
  int32_t all_end;
  int32_t exists;
  int32_t new_tile;      // the previous segment belongs to another tile
  int32_t whole;         // the block has all keys of the tile
  int32_t only;          // the tile has no other segment
  int32_t last;          // the last segment of the tile
  int32_t place;         // of its part, if other blocks have parts of the tile
  int32_t query_buffer;  // of the tile
};

// The position of a block in its range.
struct alignas(16) Cursor {
  int64_t left;       // units
  int64_t end;        // of the range, in units of all blocks
  int64_t cut_last;   // last unit of the tile that the end of the range cuts
  int32_t cut_units;  // units of that tile; 0: no tile is cut
  int32_t sequence;
  int32_t tile;    // of the sequence
  int32_t unit;    // of the tile; below 0 in its lead
  int32_t window;  // the first sequence that is described; -1: none
  int32_t owner;   // the block in which the tile begins
  int32_t steps;   // of the segments so far
  int32_t tiles;   // so far
};

inline constexpr int kWindow = 32;  // sequences that are described at a time: one per lane
// The previous segment, whose rows some warp may be recomputing, the current one, the next, and the
// one after it.
inline constexpr int kSegments = 4;

struct BlockState {
  Cursor cursor;
  int64_t total;   // units of all blocks
  int32_t blocks;  // blocks that have a range
  // Rows of each KV head of a tile, one bit each; 0 unless they are being computed again.
  uint32_t suspect_rows[kWarps];
  int64_t warp_units[kWarps];
  // For ranges of whole tiles: units before each sequence, units per tile of it, and units before
  // each range.
  int64_t before[kThreads];
  int32_t tile_units[kThreads];
  int64_t range_begin[kThreads];
  Described window[kWindow];
  Segment segments[kSegments];
};

inline constexpr int kMostShared = 99 * 1024;  // bytes of an sm_89 block

// For keys and values of the queries' type, or of fp8. Steps are the same, and so are bits.
template <class Element, int kDim, int kDimV, int kRows, bool kFp8_>
struct Traits : few_rows::Traits<Element, kDim, kDimV, kRows> {
  using Base = few_rows::Traits<Element, kDim, kDimV, kRows>;

  static constexpr bool kFp8 = kFp8_;
  // For fp8, whether the rows of the next step are found before this one's numbers are reordered.
  // Loads of keys are then issued earlier, and registers are held for longer.
  static constexpr bool kFindsFirst = kFp8 && kDim + kDimV <= 320;

  // Queries of the KV heads of a tile and of the next one. The sum of a tile's chunks and the
  // block's state follow the storage of the few-row kernels.
  static constexpr int kQueryHeadBytes = Base::kRowBlocks * Base::kKChunks * kThreadsPerWarp * 16;
  static constexpr int kQueriesOffset = Base::shared_bytes(kWarps, 1);
  static constexpr int kSumBytes = Base::kUnits * (16 + 8);
  static constexpr int sum_offset(int tile_heads) {
    return kQueriesOffset + 2 * tile_heads * kQueryHeadBytes;
  }
  static constexpr int state_offset(int tile_heads) {
    return (sum_offset(tile_heads) + kSumBytes + 15) / 16 * 16;
  }
  static constexpr int shared_bytes(int tile_heads) {
    return state_offset(tile_heads) + static_cast<int>(sizeof(BlockState));
  }
  // KV heads of a tile, at most.
  static constexpr int kTileHeads = shared_bytes(4) <= kMostShared   ? 4
                                    : shared_bytes(2) <= kMostShared ? 2
                                                                     : 1;
  static constexpr int kSumOffset = sum_offset(kTileHeads);
  static constexpr int kStateOffset = state_offset(kTileHeads);
  static constexpr int kSharedBytes = shared_bytes(kTileHeads);

  static_assert(kSumOffset % 16 == 0);
  static_assert(kSharedBytes <= kMostShared);
};

}  // namespace flashmoe::sm89_decode
