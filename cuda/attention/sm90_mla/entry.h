// One instantiated kernel and the one behind it, as the host sees them.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm90_mla/params.h"

namespace flashmoe::sm90_mla {

struct Entry : AttentionKernel {
  Kernel combine;
  int box_columns;
  int units_log2;  // of four columns of a row of a part
};

}  // namespace flashmoe::sm90_mla
