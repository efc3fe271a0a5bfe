// One instantiated pair of few-token kernels, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/moe/sm89_few_tokens/params.h"

namespace flashmoe::moe::sm89_few_tokens {

// Dynamic, of a block: what an sm_89 block may have, less the static. A kernel is allowed what its
// device has when it is loaded there.
inline constexpr int kLeastSharedBytes = 98 * 1024;

// What the shared memory of a block depends on.
struct SharedShape {
  int stages;
  int stage_columns;
  int entry_tokens;
  int records;
  int pairs;
  int tokens;
};

struct Entry {
  Kernel up;
  Kernel down;
  Dtype dtype;
  bool bulk;   // the copy engine brings stages: for Hopper, and for so many tokens in all
  int tiles;   // of 16 weight rows, a warp
  int tokens;  // of an expert, at a time
  int threads;
  int max_stages;
  int max_columns;                            // of a stage, or a step
  int (*up_bytes)(const SharedShape& shape);  // dynamic, of a block
  int (*down_bytes)(const SharedShape& shape);
};

}  // namespace flashmoe::moe::sm89_few_tokens
