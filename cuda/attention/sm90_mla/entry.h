// One instantiated kernel and the one after it, as the host sees them.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm90_mla/params.h"

namespace flashmoe::sm90_mla {

struct Entry : AttentionKernel {
  Kernel combine;
  int box_columns;
  int units_log2;  // log2 of the units of four columns in a row of a part
};

}  // namespace flashmoe::sm90_mla
