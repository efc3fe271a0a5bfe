// One instantiated sm_89 attention backward kernel, as the host sees it.
#pragma once

#include "cuda/attention/backward/entry.h"

namespace flashmoe::sm89_backward {

struct Entry : attention_backward::Entry {
  int blocks_per_sm;  // that it is designed to run with
};

}  // namespace flashmoe::sm89_backward
