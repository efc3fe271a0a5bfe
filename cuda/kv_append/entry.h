// The instantiated appending kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"

namespace flashmoe::kv_append {

inline constexpr int kThreads = 256;
inline constexpr int kPieceBytes = 16;
inline constexpr int kMostBlockRows = 128;  // of packed batches, whose owners a block keeps

struct Entry {
  Kernel kernel;
  Dtype dtype;
};

inline constexpr int kEntries = 3;
extern const Entry entries[kEntries];

}  // namespace flashmoe::kv_append
