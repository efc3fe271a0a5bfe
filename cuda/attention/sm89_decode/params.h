// Arguments of the kernels: those of all that decode.
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
  int32_t plain_tables;  // of the tables of sequences none but cu_seqlens_q and seqused_k is given
  int32_t most_tiles;    // of all sequences; 0: sequences are too many for shares of whole tiles
};

inline constexpr int kWarps = 8;  // of a block
inline constexpr int kThreads = 32 * kWarps;

}  // namespace flashmoe::sm89_decode
