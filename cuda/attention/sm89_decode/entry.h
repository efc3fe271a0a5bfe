// One instantiated decoding kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm89_decode/params.h"

namespace flashmoe::sm89_decode {

struct Entry : AttentionKernel {
  int units_log2;    // of four columns of a row of a part
  bool fp8 = false;  // what keys and values are of
};

// The second kernel of each type of elements.
extern const Kernel kCombineFp16;
extern const Kernel kCombineBf16;

}  // namespace flashmoe::sm89_decode
