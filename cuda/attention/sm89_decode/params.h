// Arguments of the kernels: those of all that decode.
#pragma once

#include "cuda/attention/decode/params.h"

namespace flashmoe::sm89_decode {

using attention_decode::CacheScales;
using attention_decode::ChunkStrides;
using attention_decode::CutTile;
using attention_decode::kMostChunks;
using attention_decode::kMostCombineRowsLog2;
using attention_decode::Params;
using attention_decode::places_of;
using attention_decode::TileRows;

inline constexpr int kWarps = 8;  // of a block
inline constexpr int kThreads = 32 * kWarps;

}  // namespace flashmoe::sm89_decode
