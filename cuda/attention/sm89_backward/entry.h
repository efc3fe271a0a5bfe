// One instantiated sm_89 attention backward kernel with its prologue, as the host sees them.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm89_backward {

struct Entry : AttentionKernel {
  int blocks_per_sm;  // that it is designed to run with
  Kernel prologue;    // a block for each tile of queries
  int prologue_threads;
};

}  // namespace flashmoe::sm89_backward
