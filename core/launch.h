// The launches of this thread's last call, on any backend.
#pragma once

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// A launch. The GPU part is read back from the runtime on request.
struct LaunchRecord {
  flashmoe_launch info;
  const void* function;  // GPU: handle for `read`; CPU: nullptr
  flashmoe_status (*read)(const LaunchRecord& record, flashmoe_launch* launch);
  int32_t index;  // in the plan; repeats of a launch keep the first record
};

// Begins a call: the next recorded launch is its first.
void begin_launches();

// Records a launch, in order. Drops it without memory, or beyond FLASHMOE_MAX_LAUNCHES of a call.
void record_launch(const LaunchRecord& record);

// Records a CPU launch, which has nothing to read back. Repeats are recorded once.
inline void record_launch(const flashmoe_launch& launch) {
  record_launch(LaunchRecord{launch, nullptr, nullptr, 0});
}

}  // namespace flashmoe
