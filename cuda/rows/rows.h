// Rows of heads that kernels move or merge, as the device sees them, and how blocks share them.
// Strides of rows are bytes, others elements.
#pragma once

#include <cstdint>

namespace flashmoe::rows {

inline constexpr int kThreads = 256;        // of a block
inline constexpr int kPieceBytes = 16;      // that a thread loads or stores at a time
inline constexpr int kMostBlockRows = 128;  // of which a block keeps something each

// Read, or written.
struct Rows {
  char* data;
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// Factors of a cache of fp8: [batch or pages, heads]; data is nullptr: all are 1.
struct Scales {
  const float* data;
  int64_t batch;
  int64_t head;
};

}  // namespace flashmoe::rows
