// The instantiated appending kernels, as the host sees them.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/rows/rows.h"

namespace flashmoe::kv_append {

using rows::kMostBlockRows;  // per block of a packed batch, which keeps their owners
using rows::kPieceBytes;
using rows::kThreads;

inline constexpr int kMostUnitHeads = 4;

// How heads of k and q are rotated. Each kind has its own kernels: registers that one needs would
// cost the others threads.
enum class Turn : int {
  kNone,
  kHalves,      // numbers i and pairs + i are a pair; halves are whole pieces of 16 bytes
  kNeighbours,  // numbers 2 i and 2 i + 1 are a pair
  kNumbers,     // halves that are no whole pieces
};

struct Entry {
  Kernel kernel;
  Dtype dtype;
  Turn turn;
  bool packed;
};

inline constexpr int kEntries = 24;
extern const Entry entries[kEntries];

}  // namespace flashmoe::kv_append
