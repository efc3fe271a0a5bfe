// One instantiated chooser, as the host sees it: the kernel that routes in one launch, and the
// first of two.
#pragma once

#include "cuda/launch.h"
#include "cuda/moe/route/params.h"

namespace flashmoe::moe_route {

// Dynamic, per block: the limit of an sm_89 block minus the static memory.
inline constexpr int kMaxSharedBytes = 98 * 1024;

struct Entry : Kernel {  // the kernel that routes in one launch
  Kernel choose;
  int max_experts;
  bool any_choice;                                    // takes other logits than 16-bit ones, too
  int threads;                                        // per block, at most
  int (*scratch_words)(int experts, int num_groups);  // per warp
  int (*once_bytes)(const SharedShape& shape);
  int (*choose_bytes)(const SharedShape& shape);
  int* most_blocks;  // [kMaxDevices]: blocks per cluster that can run there; 1 without clusters
};

}  // namespace flashmoe::moe_route
