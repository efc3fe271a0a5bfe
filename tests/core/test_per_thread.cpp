// What threads keep apart, and what they say without memory for it. aligned_alloc and free are
// wrapped, to fail and to be counted.
#include "core/per_thread.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace {

std::atomic<bool> out_of_memory{false};
std::mutex mutex;
std::vector<void*> blocks;  // allocated and not freed

size_t count_blocks() {
  const std::lock_guard<std::mutex> lock(mutex);
  return blocks.size();
}

}  // namespace

extern "C" {

void* __real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void* block);

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  if (out_of_memory) return nullptr;
  void* const block = __real_aligned_alloc(alignment, bytes);
  CHECK(block != nullptr);
  std::memset(block, 0xa5, bytes);  // as memory that was used before
  const std::lock_guard<std::mutex> lock(mutex);
  blocks.push_back(block);
  return block;
}

void __wrap_free(void* block) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(std::remove(blocks.begin(), blocks.end(), block), blocks.end());
  }
  __real_free(block);
}

}  // extern "C"

namespace flashmoe {
namespace {

struct Large {
  alignas(64) unsigned char bytes[100000];
  int filled = 7;
};

struct Small {
  int value;
};

void each_thread_has_its_own_until_it_ends() {
  const size_t before = count_blocks();
  std::thread([] {
    CHECK(PerThread<Large>::existing() == nullptr);
    Large* const mine = PerThread<Large>::get();
    CHECK(mine != nullptr && PerThread<Large>::get() == mine &&
          PerThread<Large>::existing() == mine);
    CHECK(reinterpret_cast<uintptr_t>(mine) % alignof(Large) == 0 && mine->filled == 7);
    for (const unsigned char byte : mine->bytes) CHECK(byte == 0);
    std::memset(mine->bytes, 1, sizeof mine->bytes);
    Small* const small = PerThread<Small>::get();
    CHECK(small != nullptr && small->value == 0);
    small->value = 1;
    std::thread([mine] {
      CHECK(PerThread<Large>::existing() == nullptr);
      CHECK(PerThread<Large>::get() != mine && PerThread<Large>::get()->bytes[0] == 0);
      CHECK(PerThread<Small>::existing() == nullptr);
    }).join();
    CHECK(mine->bytes[99999] == 1 && small->value == 1);
    CHECK(count_blocks() >= 2);
  }).join();
  CHECK(count_blocks() == before);
}

std::atomic<int> calls_at_the_end{0};

// Keys are younger than the library's, whose destructor runs before theirs, and again after it.
void a_thread_may_call_while_it_ends() {
  pthread_key_t key;
  CHECK(pthread_key_create(&key, [](void*) {
          CHECK(PerThread<Large>::existing() == nullptr);
          CHECK(PerThread<Large>::get() != nullptr && PerThread<Large>::get()->bytes[5] == 0);
          CHECK(fail(FLASHMOE_ERROR_INTERNAL, "at the end") == FLASHMOE_ERROR_INTERNAL);
          CHECK(std::strcmp(flashmoe_last_error(), "at the end") == 0);
          ++calls_at_the_end;
        }) == 0);
  const size_t before = count_blocks();
  std::thread([key] {
    PerThread<Large>::get()->bytes[5] = 1;
    CHECK(fail(FLASHMOE_ERROR_INTERNAL, "before") == FLASHMOE_ERROR_INTERNAL);
    CHECK(pthread_setspecific(key, &calls_at_the_end) == 0);
  }).join();
  CHECK(calls_at_the_end == 1 && count_blocks() == before);
  CHECK(pthread_key_delete(key) == 0);
}

void a_forked_child_keeps_what_its_thread_has() {
  PerThread<Small>::get()->value = 42;
  CHECK(fail(FLASHMOE_ERROR_INTERNAL, "parent") == FLASHMOE_ERROR_INTERNAL);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(PerThread<Small>::get()->value == 42);
    CHECK(std::strcmp(flashmoe_last_error(), "parent") == 0);
    CHECK(fail(FLASHMOE_ERROR_INTERNAL, "child") == FLASHMOE_ERROR_INTERNAL);
    std::thread([] {
      CHECK(std::strcmp(flashmoe_last_error(), "") == 0);
      CHECK(PerThread<Small>::get()->value == 0);
    }).join();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(std::strcmp(flashmoe_last_error(), "parent") == 0);
}

void without_memory_the_status_is_kept_and_the_sentence_says_so() {
  std::thread([] {
    out_of_memory = true;
    CHECK(PerThread<Large>::get() == nullptr && PerThread<Large>::existing() == nullptr);
    CHECK(std::strcmp(flashmoe_last_error(), "") == 0);
    CHECK(fail(FLASHMOE_ERROR_UNSUPPORTED, "q: wrong") == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strcmp(flashmoe_last_error(),
                      "out of memory for the sentence of this thread's last error") == 0);
    out_of_memory = false;
    CHECK(fail(FLASHMOE_ERROR_UNSUPPORTED, "k: wrong") == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strcmp(flashmoe_last_error(), "k: wrong") == 0);
    out_of_memory = true;  // which a thread that has its memory does not notice
    CHECK(fail(FLASHMOE_ERROR_UNSUPPORTED, "v: wrong") == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strcmp(flashmoe_last_error(), "v: wrong") == 0);
    out_of_memory = false;
    CHECK(PerThread<Large>::get() != nullptr);
  }).join();
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::each_thread_has_its_own_until_it_ends();
  flashmoe::a_thread_may_call_while_it_ends();
  flashmoe::a_forked_child_keeps_what_its_thread_has();
  flashmoe::without_memory_the_status_is_kept_and_the_sentence_says_so();
  return 0;
}
