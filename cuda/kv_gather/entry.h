// The instantiated gathering kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/kv_append/entry.h"
#include "cuda/launch.h"

namespace flashmoe::kv_gather {

using kv_append::kMostBlockRows;  // whose places a block keeps
using kv_append::kPieceBytes;
using kv_append::kThreads;  // rows are cut by cuda/kv_append/shares.h

struct Entry {
  Kernel kernel;
  Dtype dtype;
  bool fp8;  // what caches are of, else of the same dtype
};

inline constexpr int kEntries = 6;
extern const Entry entries[kEntries];

}  // namespace flashmoe::kv_gather
