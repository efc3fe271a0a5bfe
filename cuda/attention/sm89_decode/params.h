// Arguments of the kernels: those of all families that decode, and some more.
#pragma once

#include "cuda/attention/decode/params.h"

namespace flashmoe::sm89_decode {

using attention_decode::CacheScales;
using attention_decode::ChunkStrides;
using attention_decode::CutTile;
using attention_decode::kMostChunks;
using attention_decode::kMostCombineRowsLog2;
using attention_decode::places_of;
using attention_decode::TileRows;

struct Params : attention_decode::Params {
  int32_t plain_tables;  // no tables but cu_seqlens_q, seqused_k and page_table are given
  int32_t most_tiles;    // over all sequences; 0: too many sequences for ranges of whole tiles
  int32_t tiles_of_row;  // tiles of the same rows of a sequence: its KV heads by those of a tile
  int32_t
      warps_of_head;  // warps of a KV head of a tile, which take its steps in turn; a power of 2
  // Units that a tile counts for beside its keys. A cut in this lead is one in front of the keys.
  int32_t lead;
};

// Cost of ending a tile and beginning the next, in bytes of keys and values that a block would have
// read meanwhile.
inline constexpr int kLeadBytes = 128 << 10;

inline constexpr int kWarps = 8;  // per block
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kThreadsLog2 = 8;
static_assert(1 << kThreadsLog2 == kThreads);

}  // namespace flashmoe::sm89_decode
