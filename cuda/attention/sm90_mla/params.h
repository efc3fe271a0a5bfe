// Arguments of both kernels, as the device sees them.
#pragma once

#include <cuda.h>

#include "cuda/attention/decode/params.h"

namespace flashmoe::sm90_mla {

inline constexpr int kRows = 64;       // of a tile
inline constexpr int kBlockKeys = 64;  // of a block of keys

// Of the second kernel.
inline constexpr int kSumThreads = 256;
inline constexpr int kSumBlocks = 3;  // of a multiprocessor
inline constexpr int kQuarters = 4;   // of the columns of a row: a warp has one

struct Params : attention_decode::Params {  // blocks: all of them; places of parts are as there
  CUtensorMap keys;                         // boxes of 64 columns and so many rows
  CUtensorMap queries;                      // boxes of 64 columns and a tile's rows, if there are
  int32_t query_heads;                      // of such a box; 0: rows of a tile are none
  int32_t box_rows;                         // a power of two, which divides what pages have
  int32_t shares;                           // blocks that share the keys of each row tile
  Divisor by_shares;
  Divisor by_row_tiles;  // of a KV head, at most
  int32_t evict_first;   // the L2 need not keep keys for other row tiles
  int32_t cuts_by_tile;  // cut_tiles has one for each tile, not for each block
  int32_t cuts;          // that cut_tiles has; 0: no tile is cut

  // Sequences are told apart by their number of keys alone, which seqused_k has one behind the
  // other: so many queries, and at most so many keys, each of them has.
  int32_t plain;
  int32_t plain_q;
  int32_t plain_k;
};

}  // namespace flashmoe::sm90_mla
