// The instantiated combining kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe_combine {

struct Entry {
  Kernel kernel;
  Dtype dtype;
  int batch;  // rows of a token that a thread loads at a time
};

inline constexpr int kEntries = 6;
extern const Entry entries[kEntries];  // smaller batches first for each dtype

}  // namespace flashmoe::moe_combine
