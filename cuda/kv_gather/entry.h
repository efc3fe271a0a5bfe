// The instantiated gathering kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::kv_gather {

inline constexpr int kThreads = 256;
inline constexpr int kPieceBytes = 16;
inline constexpr int kMostBlockRows = 128;  // whose places a block keeps

struct Entry {
  Kernel kernel;
  Dtype dtype;
  bool fp8;  // what caches are of, else of the same dtype
};

inline constexpr int kEntries = 6;
extern const Entry entries[kEntries];

}  // namespace flashmoe::kv_gather
