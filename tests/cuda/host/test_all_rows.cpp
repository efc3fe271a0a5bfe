// Where a device has the offsets of all rows (cuda/moe/all_rows.cu), on a made-up CUDA: looked up
// once in each context. test_all_rows [no-driver]: without the driver's functions, by which
// contexts are told apart, at every call.
#include <cstdint>
#include <cstring>
#include <thread>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

// What the runtime would say in the current context, and nothing more of it.
const int32_t* looked_up() {
  void* address = nullptr;
  CHECK(cudaGetSymbolAddress(&address, nullptr) == cudaSuccess);
  return static_cast<const int32_t*>(address);
}

// How often a call looks them up, which finds those of the current context.
int lookups(int device) {
  const int before = fake::state.symbol_lookups;
  const int32_t* offsets = nullptr;
  CHECK(cuda_all_rows(device, &offsets) == FLASHMOE_OK);
  const int made = fake::state.symbol_lookups - before;
  CHECK(cudaSetDevice(device) == cudaSuccess);
  CHECK(offsets == looked_up());
  return made;
}

void a_context_is_asked_once() {
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(lookups(0) == 1);
  CHECK(lookups(0) == 0);
  fake::reset(0);
  CHECK(lookups(0) == 1);
  CHECK(lookups(0) == 0);
}

void devices_have_their_own() {
  CHECK(lookups(1) == 1);
  CHECK(lookups(1) == 0);
  CHECK(lookups(0) == 1);
}

void a_callers_own_context_has_its_own() {
  CHECK(lookups(0) == 0);
  fake::use_own_context(0);
  const int32_t* offsets = nullptr;
  CHECK(cuda_all_rows(0, &offsets) == FLASHMOE_OK);
  CHECK(offsets == looked_up());
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(lookups(0) == 1);
}

void a_new_thread_asks_anew() {
  std::thread([] {
    CHECK(lookups(0) == 1);
    CHECK(lookups(0) == 0);
  }).join();
}

void a_failure_is_said_and_not_kept() {
  fake::reset(0);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  fake::state.symbol_lookup = cudaErrorInvalidResourceHandle;
  const int32_t* offsets = nullptr;
  CHECK(cuda_all_rows(0, &offsets) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strstr(flashmoe_last_error(), "all rows on cuda:0: invalid resource handle"));
  CHECK(cudaGetLastError() == cudaSuccess);
  fake::state.symbol_lookup = cudaSuccess;
  CHECK(lookups(0) == 1);
}

void every_call_asks_without_ids() {
  CHECK(lookups(0) == 1);
  CHECK(lookups(0) == 1);
}

}  // namespace
}  // namespace flashmoe

int main(int argc, char** argv) {
  using namespace flashmoe;
  if (argc > 1 && std::strcmp(argv[1], "no-driver") == 0) {
    fake::state.has_driver = false;
    every_call_asks_without_ids();
    return 0;
  }
  a_context_is_asked_once();
  devices_have_their_own();
  a_callers_own_context_has_its_own();
  a_new_thread_asks_anew();
  a_failure_is_said_and_not_kept();
  return 0;
}
