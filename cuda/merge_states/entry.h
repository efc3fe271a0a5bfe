// The instantiated merging kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/rows/rows.h"

namespace flashmoe::merge_states {

using rows::kMostBlockRows;  // whose weights a block keeps
using rows::kThreads;

inline constexpr int kUnitNumbers = 8;  // of a row, that a thread merges at a time

inline constexpr int kMostWeights = 4096;  // that a block keeps
inline constexpr int kLsesOfThread = 4;    // of a row's, as long as a warp suffices

struct Entry {
  Kernel kernel;
  Dtype dtype;  // of outs
  // A unit is twice four numbers, half a row apart, so that those of fp32 are 16 bytes beside the
  // next thread's; where no tensor is of fp32, eight numbers of 16 bits are.
  bool halves;
};

inline constexpr int kEntries = 5;
extern const Entry entries[kEntries];

}  // namespace flashmoe::merge_states
