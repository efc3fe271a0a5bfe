// The instantiated combining kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::moe_combine {

struct Entry {
  Kernel kernel;
  Dtype dtype;
  int batch;  // experts of a token whose rows a thread loads at a time
};

inline constexpr int kEntries = 6;
extern const Entry entries[kEntries];  // of a dtype, smaller batches first

}  // namespace flashmoe::moe_combine
