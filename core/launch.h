// What was launched last, by whatever backend.
#pragma once

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// The last launch of this thread. The GPU part is read back from the runtime when it is asked for.
struct LaunchRecord {
  flashmoe_launch info;
  const void* function;  // GPU: handle for LaunchReader; CPU: nullptr
  flashmoe_status (*read)(const LaunchRecord& record, flashmoe_launch* launch);
};

LaunchRecord& last_launch_record();

}  // namespace flashmoe
