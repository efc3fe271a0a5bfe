// What the host knows of the second kernel of a call whose keys are split over blocks
// (combine.cuh), and of the workspace between the two.
#pragma once

#include <cstdint>

namespace flashmoe {

inline constexpr int kCombineThreads = 256;              // of a block
inline constexpr int kCombineBlocks = 2;                 // of a multiprocessor, at least
inline constexpr int kCombineBatch = 8;                  // parts that a thread loads at a time
inline constexpr double kMostWorkspaceBytes = 16 << 20;  // of all parts of a call

// A block combines rows of `units` units of four columns; each by 2^this threads for each unit: as
// many as have all parts on their way at a time, and while rows are few more, so that the device is
// busy.
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
