// One instantiated pair of few-token kernels, as the host sees it.
#pragma once

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda/moe/sm89_few_tokens/params.h"

namespace flashmoe::moe::sm89_few_tokens {

// Dynamic, per block: the limit of an sm_89 block minus the static memory. When a kernel is loaded
// on a device, it is allowed that device's limit.
inline constexpr int kLeastSharedBytes = 98 * 1024;

// The quantities that a block's shared memory depends on.
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
  bool bulk;   // the copy engine fills stages: for Hopper, and for few tokens in total
  int tiles;   // tiles of 16 weight rows per warp
  int tokens;  // tokens of an expert at a time
  int threads;
  int max_stages;
  int max_columns;                            // per stage, or per step
  int (*up_bytes)(const SharedShape& shape);  // dynamic, per block
  int (*down_bytes)(const SharedShape& shape);
};

}  // namespace flashmoe::moe::sm89_few_tokens
