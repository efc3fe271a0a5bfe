// Kernel parameters of the sm_89 attention backward, filled on the host.
#pragma once

#include "cuda/attention/backward/ragged_params.h"

namespace flashmoe::sm89_backward {

using attention_backward::Gradient;
using attention_backward::Rows;
using Params = attention_backward::CommonParams;
using BiasedParams = attention_backward::BiasedParams;
using RaggedParams = attention_backward::RaggedParams;
using RaggedBiasedParams = attention_backward::RaggedBiasedParams;

static_assert(sizeof(RaggedBiasedParams) <= 4096, "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm89_backward
