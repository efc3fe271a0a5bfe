// One instantiated sm_90 attention backward kernel, as the host sees it.
#pragma once

#include "cuda/attention/backward/entry.h"

namespace flashmoe::sm90_backward {

struct Entry : attention_backward::Entry {
  bool capped;      // only for logits with a softcap
  int box_columns;  // per box
  int box_rows;     // per box of dq, dk and dv
  int dq_parts;     // parts that a warp adds or withholds one at a time (params.h)
  int key_parts;    // of dk and dv
};

}  // namespace flashmoe::sm90_backward
