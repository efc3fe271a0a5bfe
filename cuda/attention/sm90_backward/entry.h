// One instantiated sm_90 attention backward kernel with its prologue and the kernel of dsinks, as
// the host sees them.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm90_backward {

struct Entry : AttentionKernel {
  bool capped;      // for logits with a softcap, and for no others
  int box_columns;  // of every box
  int box_rows;     // of a box of dq, dk and dv
  int dq_panels;    // of a tile of dq: each has its turns
  Kernel prologue;
  int prologue_rows;  // of a block
  int prologue_threads;
  Kernel sinks;
  int sinks_threads;
};

}  // namespace flashmoe::sm90_backward
