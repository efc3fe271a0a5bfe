// One instantiated attention backward kernel with its prologue and what comes behind it, as the
// host sees them. Families add their own.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::attention_backward {

struct Entry : AttentionKernel {
  int dq_panels;  // of a tile of dQ: each has its turns
  Kernel prologue;
  int prologue_rows;  // of a block
  int prologue_threads;
  Kernel behind;  // dsinks, and the repair of families that have one
  int behind_threads;
  int split_floats;          // dV and dK of a split of an item; 0: the kernel splits none
  int repair_blocks;         // of a call with bounds that adds to nothing; 0: there is no repair
  int cluster = 1;           // blocks that share an item
  bool ragged = false;       // of ragged and padded batches, and of no others
  bool biased = false;       // of calls with a bias or a mask, and of no others
  bool one_of_both = false;  // a bias of fp32 and a mask are not for it
  int wave_heads = 0;        // with so many query heads to a KV head items run in waves; 0: never
};

}  // namespace flashmoe::attention_backward
