// The kernels of weights' gradients, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe::sm89_backward {

struct Entry : Kernel {
  Dtype dtype;
  int tile;  // rows and columns of a gradient
  int stages;
  int threads;
};

inline constexpr int kEntries = 2;
extern const Entry entries[kEntries];

}  // namespace flashmoe::moe::sm89_backward
