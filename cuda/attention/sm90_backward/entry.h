// One instantiated sm_90 attention backward kernel, as the host sees it.
#pragma once

#include "cuda/attention/backward/entry.h"

namespace flashmoe::sm90_backward {

struct Entry : attention_backward::Entry {
  bool capped;      // for logits with a softcap, and for no others
  int box_columns;  // of every box
  int box_rows;     // of a box of dq, dk and dv
  int dq_parts;     // of which a warp adds or withholds one: params.h
  int key_parts;    // of dk and dv
};

}  // namespace flashmoe::sm90_backward
