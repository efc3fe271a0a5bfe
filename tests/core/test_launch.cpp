// What a thread's last call launched (core/launch.h).
#include "core/launch.h"

#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

flashmoe_launch named(const char* kernel, uint32_t blocks = 1) {
  flashmoe_launch launch = {};
  std::snprintf(launch.kernel, sizeof launch.kernel, "%s", kernel);
  launch.grid[0] = blocks;
  return launch;
}

// "a b", of the last call.
std::string last() {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = -1;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
  std::string kernels;
  for (int32_t i = 0; i < count; ++i) {
    kernels += (i == 0 ? "" : " ") + std::string(launches[i].kernel);
  }
  return kernels;
}

void nothing_is_read_back_before_a_launch() {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES] = {named("mine")};
  int32_t count = 77;
  for (int i = 0; i < 2; ++i) {
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strcmp(flashmoe_last_error(), "launches: nothing was launched on this thread yet") ==
          0);
    CHECK(count == 77 && std::strcmp(launches[0].kernel, "mine") == 0);
    begin_launches();  // a call that fails before it launches anything
  }
  CHECK(flashmoe_last_launches(nullptr, &count) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strcmp(flashmoe_last_error(), "launches: got a null pointer") == 0);
  CHECK(flashmoe_last_launches(launches, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strcmp(flashmoe_last_error(), "count: got a null pointer") == 0);
}

void launches_are_those_of_the_last_call_that_launched() {
  begin_launches();
  record_launch(named("a"));
  CHECK(last() == "a");
  record_launch(named("b"));
  CHECK(last() == "a b");
  begin_launches();
  CHECK(last() == "a b");  // nothing launched
  begin_launches();
  record_launch(named("c"));
  CHECK(last() == "c" && last() == "c");
}

void threads_have_their_own() {
  begin_launches();
  record_launch(named("mine"));
  std::thread([] {
    flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
    int32_t count;
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    begin_launches();
    record_launch(named("theirs"));
    CHECK(last() == "theirs");
  }).join();
  CHECK(last() == "mine");
}

void more_than_fit_are_not_kept() {
  begin_launches();
  for (uint32_t i = 0; i < FLASHMOE_MAX_LAUNCHES + 3; ++i) record_launch(named("x", i));
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
  CHECK(count == FLASHMOE_MAX_LAUNCHES);
  for (uint32_t i = 0; i < FLASHMOE_MAX_LAUNCHES; ++i) CHECK(launches[i].grid[0] == i);
}

flashmoe_status read_back(const LaunchRecord& record, flashmoe_launch* launch) {
  launch->registers = *static_cast<const int32_t*>(record.function);
  return launch->registers < 0 ? fail(FLASHMOE_ERROR_CUDA, "%s: it is gone", launch->kernel)
                               : FLASHMOE_OK;
}

// Read when it is asked for; where one cannot be, nothing is filled in.
void a_backend_reads_its_own_back() {
  int32_t registers[] = {32, 168};
  begin_launches();
  record_launch({named("a"), &registers[0], read_back, 0});
  record_launch({named("b"), &registers[1], read_back, 1});
  registers[0] = 40;
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK && count == 2);
  CHECK(launches[0].registers == 40 && launches[1].registers == 168);
  registers[0] = 48;
  registers[1] = -1;
  count = 77;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strcmp(flashmoe_last_error(), "b: it is gone") == 0);
  CHECK(count == 77 && launches[0].registers == 40);
}

// Launches that a plan has repeated are kept once, of each call.
void what_is_repeated_is_kept_once() {
  int32_t registers = 32;
  const auto launch = [&](const char* name, int32_t index, int32_t repeats) {
    flashmoe_launch info = named(name);
    info.repeats = repeats;
    record_launch({info, &registers, read_back, index});
  };
  for (int call = 0; call < 2; ++call) {
    begin_launches();
    for (int chunk = 0; chunk < 3; ++chunk) {
      launch("a", 0, 3);
      launch("b", 1, 3);
    }
    launch("c", 2, 0);
    flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
    int32_t count = 0;
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK && count == 3);
    CHECK(std::strcmp(launches[1].kernel, "b") == 0 && launches[1].repeats == 3);
    CHECK(std::strcmp(launches[2].kernel, "c") == 0 && launches[2].repeats == 0);
  }
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::nothing_is_read_back_before_a_launch();
  flashmoe::launches_are_those_of_the_last_call_that_launched();
  flashmoe::threads_have_their_own();
  flashmoe::more_than_fit_are_not_kept();
  flashmoe::a_backend_reads_its_own_back();
  flashmoe::what_is_repeated_is_kept_once();
  return 0;
}
