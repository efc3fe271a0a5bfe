// One instantiated split attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::split {

struct Entry : AttentionKernel {
  bool capped;      // for logits with a softcap, and for no others
  int box_columns;  // of every box
  int groups;       // of 64 rows, of a tile
  int part_bytes;   // of the workspace, for each part of a tile
  Kernel combine;   // the second kernel
};

}  // namespace flashmoe::split
