// Workspaces of the CPU, of which every thread has a part of its own.
//
// The number of threads may change between a query and the call that it was for. So what a query told
// stays enough, whatever the number was: a call uses as many threads as its workspace has room for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// Zeros: a call cannot make do with less than was planned.
struct ThreadRoom {
  uint64_t least;  // bytes for a call by one thread; no query tells less, by any number of threads
  uint64_t per_thread;  // for each further thread
};

inline void limit_threads(uint32_t most, flashmoe_attention_plan* plan) {
  plan->block[0] = std::min(plan->block[0], most);
}

inline void limit_threads(uint32_t most, flashmoe_moe_plan* plan) {
  for (int32_t i = 0; i < plan->launches; ++i) {
    plan->stage[i].block[0] = std::min(plan->stage[i].block[0], most);
  }
}

// Has a plan make do with a workspace that is smaller than planned, if one thread can.
template <class Plan>
void fit_threads(const ThreadRoom& room, uint64_t workspace_bytes, Plan* plan) {
  if (room.least == 0 || workspace_bytes < room.least || workspace_bytes >= plan->workspace_bytes) {
    return;
  }
  const uint64_t further =
      std::min<uint64_t>((workspace_bytes - room.least) / room.per_thread, UINT32_MAX - 1);
  limit_threads(static_cast<uint32_t>(1 + further), plan);
  plan->workspace_bytes = workspace_bytes;
}

}  // namespace flashmoe
