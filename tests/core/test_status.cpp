// Status names, the thread-local last error, struct sizes, and devices that are not there.
#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

void names_are_distinct() {
  std::set<std::string> names;
  for (int value = FLASHMOE_OK; value <= FLASHMOE_ERROR_INTERNAL; ++value) {
    const std::string name = flashmoe_status_name(static_cast<flashmoe_status>(value));
    CHECK(name.rfind("FLASHMOE_", 0) == 0);
    CHECK(names.insert(name).second);
  }
}

void last_error_belongs_to_the_thread() {
  CHECK(std::strcmp(flashmoe_last_error(), "") == 0);
  CHECK(flashmoe_set_num_threads(-1) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  const std::string mine = flashmoe_last_error();
  CHECK(mine.find("n: got -1") == 0);

  std::thread([] {
    CHECK(std::strcmp(flashmoe_last_error(), "") == 0);
    CHECK(flashmoe_set_log(99, nullptr, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(flashmoe_last_error(), "level: got 99") != nullptr);
  }).join();
  CHECK(mine == flashmoe_last_error());

  // A call that succeeds leaves the sentence of the last one that failed.
  CHECK(flashmoe_set_num_threads(0) == FLASHMOE_OK);
  CHECK(mine == flashmoe_last_error());
}

void struct_sizes_are_checked() {
  flashmoe_build_info build = flashmoe_build_info_init();
  flashmoe_device_info device = flashmoe_device_info_init();
  for (const size_t size : {size_t{0}, size_t{1}, sizeof build - 1, sizeof build + 8, SIZE_MAX}) {
    build.struct_size = size;
    build.version = "untouched";
    CHECK(flashmoe_get_build_info(&build) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(flashmoe_last_error(), "struct_size") != nullptr);
    CHECK(std::strcmp(build.version, "untouched") == 0);
  }
  const flashmoe_device cpu = {FLASHMOE_DEVICE_CPU, 0};
  CHECK(flashmoe_get_device_info(cpu, &device) == FLASHMOE_OK);
  CHECK(device.struct_size == sizeof device);
  CHECK(std::strlen(device.isa) > 0 && device.multiprocessors >= 1);
  device.struct_size = sizeof device + 8;
  CHECK(flashmoe_get_device_info(cpu, &device) == FLASHMOE_ERROR_INVALID_ARGUMENT);
}

void devices_that_are_not_there() {
  flashmoe_device_info info = flashmoe_device_info_init();
  CHECK(flashmoe_get_device_info({FLASHMOE_DEVICE_CUDA, flashmoe_cuda_device_count()}, &info) ==
        FLASHMOE_ERROR_NO_DEVICE);
  CHECK(flashmoe_get_device_info({FLASHMOE_DEVICE_CUDA, -1}, &info) != FLASHMOE_OK);
  CHECK(flashmoe_get_device_info({7, 0}, &info) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(flashmoe_last_error(), "device: got device type 7") != nullptr);
  CHECK(flashmoe_get_device_info({FLASHMOE_DEVICE_CPU, 0}, nullptr) ==
        FLASHMOE_ERROR_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  names_are_distinct();
  // On a thread of its own: its last error must still be empty.
  std::thread(last_error_belongs_to_the_thread).join();
  struct_sizes_are_checked();
  devices_that_are_not_there();
  return 0;
}
