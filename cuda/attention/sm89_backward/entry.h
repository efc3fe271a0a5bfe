// One instantiated sm_89 attention backward kernel, as the host sees it.
#pragma once

#include "cuda/attention/backward/entry.h"

namespace flashmoe::sm89_backward {

using attention_backward::Entry;

}  // namespace flashmoe::sm89_backward
