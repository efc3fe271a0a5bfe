// One instantiated way of choosing, as the host sees it: the kernel that routes in one launch, and
// the first of two.
#pragma once

#include "cuda/launch.h"
#include "cuda/moe/route/params.h"

namespace flashmoe::moe_route {

// Dynamic, of a block; what an sm_89 block may have, less the static.
inline constexpr int kMaxSharedBytes = 98 * 1024;

struct Entry : Kernel {  // once
  Kernel choose;
  int max_experts;
  bool any_choice;                                    // not only logits of 16 bits
  int threads;                                        // of a block, at most
  int (*scratch_words)(int experts, int num_groups);  // of a warp
  int (*once_bytes)(const SharedShape& shape);
  int (*choose_bytes)(const SharedShape& shape);
  int* most_blocks;  // [kMaxDevices]: of a cluster that can run there; 1 without clusters
};

}  // namespace flashmoe::moe_route
