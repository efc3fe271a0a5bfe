// One instantiated sm_89 attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm89 {

struct Entry : AttentionKernel {
  int blocks_per_sm;    // the number it is designed for
  bool ragged;          // for ragged, padded and paged batches, else for dense ones
  bool biased = false;  // for calls with a bias or a mask, else for those without
};

}  // namespace flashmoe::sm89
