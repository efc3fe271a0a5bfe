#include "core/launch.h"

#include "core/checks.h"
#include "core/per_thread.h"
#include "core/status.h"

namespace flashmoe {
namespace {

struct LaunchList {
  bool begun;  // a call has begun and launched nothing yet
  int32_t count;
  LaunchRecord records[FLASHMOE_MAX_LAUNCHES];
};

}  // namespace

void begin_launches() {
  LaunchList* const list = PerThread<LaunchList>::get();
  if (list != nullptr) list->begun = true;
}

void record_launch(const LaunchRecord& record) {
  LaunchList* const list = PerThread<LaunchList>::existing();
  if (list == nullptr) return;
  if (list->begun) list->count = 0;
  list->begun = false;
  // A repeated launch keeps its first record.
  const bool is_repeated = record.read != nullptr && record.info.repeats > 1;
  if (is_repeated && record.index < list->count) return;
  if (list->count < FLASHMOE_MAX_LAUNCHES) list->records[list->count++] = record;
}

}  // namespace flashmoe

using flashmoe::fail;

flashmoe_status flashmoe_last_launches(flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES],
                                       int32_t* count) {
  if (launches == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "launches: got a null pointer");
  }
  if (count == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "count: got a null pointer");
  }
  const flashmoe::LaunchList* const list = flashmoe::PerThread<flashmoe::LaunchList>::existing();
  if (list == nullptr || list->count == 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "launches: nothing was launched on this thread yet");
  }
  flashmoe_launch filled[FLASHMOE_MAX_LAUNCHES];
  for (int32_t i = 0; i < list->count; ++i) {
    const flashmoe::LaunchRecord& record = list->records[i];
    filled[i] = record.info;
    if (record.read != nullptr) FLASHMOE_TRY(record.read(record, &filled[i]));
  }
  for (int32_t i = 0; i < list->count; ++i) launches[i] = filled[i];
  *count = list->count;
  return FLASHMOE_OK;
}
