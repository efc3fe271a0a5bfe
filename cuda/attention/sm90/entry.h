// One instantiated sm_90 attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm90 {

struct Entry : AttentionKernel {
  bool capped;      // for logits with a softcap, and for no others
  int box_rows;     // of a box of Q and of the output
  int box_columns;  // of every box
};

}  // namespace flashmoe::sm90
