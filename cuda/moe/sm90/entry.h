// One instantiated sm_90 grouped product, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm90 {

// How a kernel reads its operands and finishes its products.
enum class Use {
  kPlainGatedUp,   // gathers rows of x, multiplies SiLU of one half by the other; may keep both
  kGatedUp,        // the same for every activation, with bias, limit and weights of pairs
  kUp,             // gathers rows of x, activation
  kDown,           // reads contiguous rows; products plus bias
  kNarrowGatedUp,  // like kPlainGatedUp, for experts of few tokens: narrower tiles, one more stage
  kShortDown,   // like kDown, for at most 256 columns and many tokens: keeps weights in registers
  kMiddleDown,  // the same for at most 512 columns: narrower tiles
  kWideDown,    // like kDown, without a bias, to fp32 or accumulated
  kUpGradient   // gathers rows of dout; gradients through SiLU of g times u
};

// Which stride of the weights is 1. With kRowsInterleaved, the stride of rows is 2: the rows of
// gate and up are interleaved in one tensor.
enum class Major { kColumns, kRows, kRowsInterleaved };

struct Entry : Kernel {
  Dtype dtype;
  Use use;
  Major major;
  int tile_rows;    // rows of the weights, gate and up both counted
  int box_rows;     // rows of the weights per copy
  int out_rows;     // the tile's columns of the output
  int tile_tokens;  // upper bound
  int columns_per_group;
  int stages;
  int threads;
};

}  // namespace flashmoe::moe::sm90
