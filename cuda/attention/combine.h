// What the host knows about the second kernel of a call whose keys are split over blocks
// (combine.cuh), and about the workspace between the two kernels.
#pragma once

#include <cstdint>

namespace flashmoe {

inline constexpr int kCombineThreads = 256;              // per block
inline constexpr int kCombineBlocks = 2;                 // per multiprocessor, at least
inline constexpr int kCombineBatch = 8;                  // parts that a thread loads at a time
inline constexpr double kMostWorkspaceBytes = 16 << 20;  // for all parts of a call

// Log2 of the threads per unit of four columns, in a block that combines rows of `units` units.
// There are enough threads to have all parts in flight at once, and more while rows are few, so
// that the device is busy.
constexpr int combine_workers_log2(int parts, int64_t rows, int units) {
  constexpr int64_t kManyThreads = 1 << 16;
  int log2 = 0;
  while (1 << log2 < parts && units << (log2 + 1) <= kCombineThreads &&
         (kCombineBatch << log2 < parts || rows * units << (log2 + 1) <= kManyThreads)) {
    ++log2;
  }
  return log2;
}

constexpr int combine_rows_per_block(int workers_log2, int units) {
  return kCombineThreads / units >> workers_log2;
}

}  // namespace flashmoe
