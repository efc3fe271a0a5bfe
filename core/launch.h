// What this thread's last call launched, by whatever backend.
#pragma once

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// A launch. The GPU part is read back from the runtime when it is asked for.
struct LaunchRecord {
  flashmoe_launch info;
  const void* function;  // GPU: handle for `read`; CPU: nullptr
  flashmoe_status (*read)(const LaunchRecord& record, flashmoe_launch* launch);
  int32_t index;  // in the plan: of what a plan has repeated, the first is kept
};

// The next launch that is recorded is the first of its call.
void begin_launches();

// Keeps a launch, in the order of calls; without memory for it, and beyond FLASHMOE_MAX_LAUNCHES of
// a call, it is not kept.
void record_launch(const LaunchRecord& record);

// Records a launch of the CPU, which has nothing to read back. Repeats are recorded once.
inline void record_launch(const flashmoe_launch& launch) {
  record_launch(LaunchRecord{launch, nullptr, nullptr, 0});
}

}  // namespace flashmoe
