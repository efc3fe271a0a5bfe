// The instantiated merging kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/rows/rows.h"

namespace flashmoe::merge_states {

using rows::kMostBlockRows;  // a block keeps the weights of so many rows
using rows::kThreads;

inline constexpr int kUnitNumbers = 8;  // numbers of a row that a thread merges at a time

inline constexpr int kMostWeights = 4096;  // per block
inline constexpr int kLsesOfThread = 4;    // per row, if a warp suffices

struct Entry {
  Kernel kernel;
  Dtype dtype;  // dtype of outs
  // A unit is two groups of four numbers, half a row apart, so that fp32 groups are 16 bytes beside
  // those of the next thread. If no tensor is fp32, a unit is eight consecutive 16-bit numbers.
  bool halves;
};

inline constexpr int kEntries = 5;
extern const Entry entries[kEntries];

}  // namespace flashmoe::merge_states
