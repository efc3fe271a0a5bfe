// What a thread launched last, for flashmoe_last_launch.
#pragma once

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// The GPU part is read back from the runtime when it is asked for.
struct LaunchRecord {
  flashmoe_launch info;
  const void* function;  // GPU: handle for `read`; CPU: nullptr
  flashmoe_status (*read)(const LaunchRecord& record, flashmoe_launch* launch);
};

LaunchRecord& last_launch_record();

}  // namespace flashmoe
