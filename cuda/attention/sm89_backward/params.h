// Kernel parameters of the sm_89 attention backward, filled on the host.
#pragma once

#include "cuda/attention/backward/params.h"

namespace flashmoe::sm89_backward {

using attention_backward::Gradient;
using attention_backward::Rows;
using Params = attention_backward::CommonParams;

static_assert(sizeof(Params) <= 4096, "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm89_backward
