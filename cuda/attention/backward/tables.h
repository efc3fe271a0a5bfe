// The kernel that reads the tables of ragged and padded batches for the attention backward, as the
// host sees it.
#pragma once

#include "cuda/launch.h"

namespace flashmoe::attention_backward {

inline constexpr int kTablesThreads = 1024;

extern const Kernel kTablesKernel;

}  // namespace flashmoe::attention_backward
