// The kernel that tells sequences with few queries from the others, as the host sees it.
#pragma once

#include "cuda/launch.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::lengths {

inline constexpr int kLengthsThreads = 256;

struct Params {
  SequenceParams sequences;
  int32_t few;      // queries
  int32_t* many_q;  // [sequences]: queries of those with more, 0 of the others
  int32_t* few_q;   // [sequences]: the other way round
};

extern const Kernel kLengths;

}  // namespace flashmoe::lengths
