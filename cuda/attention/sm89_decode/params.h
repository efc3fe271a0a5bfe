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
};

inline constexpr int kWarps = 8;  // per block
inline constexpr int kThreads = 32 * kWarps;

}  // namespace flashmoe::sm89_decode
