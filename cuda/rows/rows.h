// Rows of heads that kernels move or merge, as the device sees them, and how blocks share them.
// Strides of rows are bytes, others are elements.
#pragma once

#include <cstdint>

namespace flashmoe::rows {

inline constexpr int kThreads = 256;        // per block
inline constexpr int kPieceBytes = 16;      // bytes that a thread loads or stores at a time
inline constexpr int kMostBlockRows = 128;  // a block keeps data of each of its rows

// Rows that a kernel reads or writes.
struct Rows {
  char* data;
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// Factors of an fp8 cache: [batch or pages, heads]. data is nullptr if all are 1.
struct Scales {
  const float* data;
  int64_t batch;
  int64_t head;
};

}  // namespace flashmoe::rows
