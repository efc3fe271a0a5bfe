// The kernels of weights' gradients, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm89_backward {

struct Entry : Kernel {
  Dtype dtype;
  int tile_m;  // rows of a gradient
  int tile_n;  // columns
  int stages;
  int threads;
  int blocks_per_sm;
};

inline constexpr int kEntries = 2;
extern const Entry entries[kEntries];

}  // namespace flashmoe::moe::sm89_backward
