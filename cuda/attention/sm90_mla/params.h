// Arguments of both kernels, as the device sees them.
#pragma once

#include <cuda.h>

#include "cuda/attention/decode/params.h"

namespace flashmoe::sm90_mla {

inline constexpr int kRows = 64;       // per tile
inline constexpr int kBlockKeys = 64;  // per block of keys

// The second kernel's constants.
inline constexpr int kSumThreads = 256;
inline constexpr int kSumBlocks = 3;  // per multiprocessor
inline constexpr int kQuarters = 4;   // quarters of a row's columns; a warp has one

struct Params : attention_decode::Params {  // blocks: all of them; places of parts as there
  CUtensorMap keys;                         // boxes of 64 columns and box_rows rows
  CUtensorMap queries;      // boxes of 64 columns and a tile's rows; see query_heads
  int32_t query_heads;      // per such box; 0: a tile's rows are no box
  int32_t box_rows;         // a power of two that divides the rows of a page
  int32_t stream_k_blocks;  // blocks that divide the keys of each row tile
  Divisor by_stream_k_blocks;
  Divisor by_row_tiles;  // per KV head, at most
  int32_t evict_first;   // the L2 need not keep keys for other row tiles
  int32_t cuts_by_tile;  // cut_tiles has an entry per tile, not per block
  int32_t cuts;          // entries of cut_tiles; 0: no tile is cut

  // Sequences differ only in their number of keys, which seqused_k has contiguously: each has
  // plain_q queries, and at most plain_k keys.
  int32_t plain;
  int32_t plain_q;
  int32_t plain_k;
};

}  // namespace flashmoe::sm90_mla
