// One instantiated attention backward kernel with its prologue and the kernel after it, as the host
// sees them. Families add their own members.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::attention_backward {

struct Entry : AttentionKernel {
  int dq_panels;  // panels of a tile of dQ, each with turns of its own
  Kernel prologue;
  int prologue_rows;  // per block
  int prologue_threads;
  Kernel behind;  // dsinks, and the repair of families that have one
  int behind_threads;
  int split_floats;          // dV and dK of a split of an item; 0: the kernel splits no items
  int repair_blocks;         // of a call with bounds that does not accumulate; 0: no repair
  int cluster = 1;           // blocks that share an item
  bool ragged = false;       // only for ragged and padded batches
  bool biased = false;       // only for calls with a bias or a mask
  bool one_of_both = false;  // it does not take an fp32 bias together with a mask
  int wave_heads = 0;        // items run in waves from so many query heads per KV head on; 0: never
};

}  // namespace flashmoe::attention_backward
