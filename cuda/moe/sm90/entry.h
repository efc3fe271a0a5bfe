// One instantiated sm_90 grouped product, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm90 {

// What a kernel does with its operands and its products.
enum class Use {
  kPlainGatedUp,   // gathers rows of x, multiplies SiLU of one half by the other
  kGatedUp,        // the same for every activation, with bias, limit and weights of pairs
  kUp,             // gathers rows of x, activation
  kDown,           // rows as they lie, products and their bias
  kNarrowGatedUp,  // as kPlainGatedUp, for experts of few tokens: narrower tiles, one more stage
  kShortDown,      // as kDown, for at most 256 columns and many tokens: keeps weights in registers
  kMiddleDown,     // the same for at most 512 columns: narrower tiles
  kWideDown,       // as kDown, without a bias, to fp32 or added to what the output holds
  kUpGradient      // gathers rows of dout, goes back through SiLU of g times u
};

// Which stride of the weights is 1; or, of kRowsInterleaved, that of rows is 2: a gate's and an
// up's rows are interleaved in one tensor.
enum class Major { kColumns, kRows, kRowsInterleaved };

struct Entry : Kernel {
  Dtype dtype;
  Use use;
  Major major;
  int tile_rows;    // of the weights, gate and up counted both
  int box_rows;     // of them, in one copy
  int out_rows;     // of them, columns of the output
  int tile_tokens;  // at most
  int columns_per_group;
  int stages;
  int threads;
};

}  // namespace flashmoe::moe::sm90
