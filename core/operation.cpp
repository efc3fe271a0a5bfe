#include "core/operation.h"

namespace flashmoe {

void log_call(const char* operation, const char* call, flashmoe_device device,
              const flashmoe_plan& plan, const void* stream) {
  char launches[2048] = "";
  size_t used = 0;
  for (int32_t i = 0; i < plan.launch_count && used < sizeof launches; ++i) {
    const flashmoe_launch& launch = plan.launches[i];
    used += static_cast<size_t>(std::snprintf(
        launches + used, sizeof launches - used, "%s%s grid=%ux%ux%u block=%u shared=%llu",
        i == 0 ? "" : ", ", launch.kernel, launch.grid[0], launch.grid[1], launch.grid[2],
        launch.block[0], static_cast<unsigned long long>(launch.shared_bytes)));
  }
  log_line(FLASHMOE_LOG_INFO, "%s %s device=%s stream=%p -> %s", operation, call,
           DeviceName(device).text, stream, launches);
  if (plan.rejected[0] != '\0') log_line(FLASHMOE_LOG_DEBUG, "rejected: %s", plan.rejected);
}

}  // namespace flashmoe
