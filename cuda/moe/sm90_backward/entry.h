// The instantiated sm_90 gradient of experts' weights, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm90_backward {

struct Entry : Kernel {
  Dtype dtype;
  int tile_m;
  int tile_n;
  int step;
  int stages;
  int threads;
};

}  // namespace flashmoe::moe::sm90_backward
