// Arguments of the kernels, as the device sees them. The second kernel is that of decoding
// (cuda/attention/sm89_decode/combine.cuh), which takes what is before the map.
#pragma once

#include <cuda.h>

#include "cuda/attention/sm89_decode/params.h"

namespace flashmoe::sm90_mla {

inline constexpr int kRows = 64;       // of a tile
inline constexpr int kBlockKeys = 64;  // of a block of keys

struct Params : sm89_decode::Params {  // blocks: all of them; places of parts are as there
  CUtensorMap keys;                    // boxes of 64 columns and so many rows
  int32_t box_rows;                    // a power of two, which divides what pages have
  int32_t shares;                      // blocks that share the keys of each row tile
  Divisor by_shares;
  Divisor by_clusters;   // of row tiles of a KV head, at most
  int32_t read_once;     // no other block reads the keys of a block
  int32_t cuts_by_tile;  // cut_tiles has one for each tile, not for each block
};

}  // namespace flashmoe::sm90_mla
