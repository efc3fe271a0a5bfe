// The instantiated gathering kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/rows/rows.h"

namespace flashmoe::kv_gather {

using rows::kMostBlockRows;  // a block keeps the places of so many rows
using rows::kPieceBytes;
using rows::kThreads;

struct Entry {
  Kernel kernel;
  Dtype dtype;
  bool fp8;  // caches are fp8, otherwise of the same dtype
};

inline constexpr int kEntries = 6;
extern const Entry entries[kEntries];

}  // namespace flashmoe::kv_gather
