#include "core/launch.h"

#include "core/checks.h"
#include "core/status.h"

namespace flashmoe {

LaunchRecord& last_launch_record() {
  thread_local LaunchRecord record = {};
  return record;
}

}  // namespace flashmoe

using flashmoe::fail;

flashmoe_status flashmoe_last_launch(flashmoe_launch* launch) {
  if (launch == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "launch: got a null pointer");
  }
  FLASHMOE_TRY(flashmoe::check_struct_size("flashmoe_launch", launch->struct_size, sizeof *launch,
                                           sizeof *launch));
  const flashmoe::LaunchRecord& record = flashmoe::last_launch_record();
  if (record.info.kernel[0] == '\0') {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "launch: nothing was launched on this thread yet");
  }
  flashmoe_launch filled = record.info;
  if (record.read != nullptr) FLASHMOE_TRY(record.read(record, &filled));
  flashmoe::copy_out(filled, launch);
  return FLASHMOE_OK;
}
