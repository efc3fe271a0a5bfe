// One instantiated decoding kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm89_decode/params.h"

namespace flashmoe::sm89_decode {

struct Entry : AttentionKernel {
  int units_log2;    // log2 of the units of four columns in a row of a part
  int tile_heads;    // KV heads of a tile, at most; a power of two
  bool fp8 = false;  // keys and values are fp8
};

// The second kernel of each element type.
extern const Kernel kCombineFp16;
extern const Kernel kCombineBf16;

}  // namespace flashmoe::sm89_decode
