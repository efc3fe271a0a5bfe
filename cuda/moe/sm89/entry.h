// One instantiated sm_89 grouped-product kernel, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm89 {

struct Entry : Kernel {
  Dtype dtype;
  bool gated;
  bool transposed;
  int tile_rows;    // rows of the weights, gate and up both counted
  int out_rows;     // the tile's columns of the output
  int tile_tokens;  // upper bound
  int stages;
  int threads;
  int blocks_per_sm;
};

}  // namespace flashmoe::moe::sm89
