#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "cpu/processors.h"

namespace flashmoe::cpu {
namespace {

constexpr int32_t kMaxThreads = 4096;

// How long a helper without work, or a caller waiting for helpers, spins before it sleeps: waking a
// sleeper takes tens of microseconds, as long as a whole small call.
constexpr std::chrono::microseconds kSpin{50};

void relax() {
#if FLASHMOE_CPU_X86
  __builtin_ia32_pause();
#endif
}

// Replaces std::condition_variable::wait. Since GCC 12 that has a new symbol, the only one that
// would keep a library built with it off distributions with GCC 11, such as Red Hat Enterprise
// Linux 9.
template <class Ready>
void wait(std::condition_variable* changed, std::unique_lock<std::mutex>* lock, Ready ready) {
  while (!ready()) {
    pthread_cond_wait(changed->native_handle(), lock->mutex()->native_handle());
  }
}

// One parallel_run, on its caller's stack, linked into the pool while helpers may still join.
struct Job {
  void (*body)(void* context, int32_t worker);
  void* context;
  int32_t next_worker;  // workers [next_worker, threads) have no thread yet
  int32_t threads;
  std::atomic<int32_t> inside;  // helpers now in body
  Job* next;
};

class Pool {
 public:
  Pool() {
#ifdef __linux__
    processors_of_process();  // asks OpenMP, once; must not run while the mutex is locked
#endif
  }

  void run(Job* job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(job->threads - 1);
      if (jobs_ == nullptr) stay_off_this_cpu(job->threads);
      job->next = jobs_;
      jobs_ = job;
      posted_.fetch_add(1, std::memory_order_release);
    }
    if (job->threads == 2) {
      work_.notify_one();
    } else {
      work_.notify_all();
    }
    job->body(job->context, 0);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      unlink(job);
    }
    const auto done = [job] { return job->inside.load(std::memory_order_acquire) == 0; };
    if (spin(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    wait(&done_, &lock, done);
  }

 private:
  // Fewer helpers than asked for is slower, not wrong.
  void grow(int32_t helpers) {
    while (helpers_.size() < static_cast<size_t>(helpers)) {
      try {
        helpers_.reserve(helpers_.size() + 1);
        std::thread helper([this] { help(); });
        helpers_.push_back(helper.native_handle());
        helper.detach();
      } catch (const std::exception&) {
        return;
      }
#ifdef __linux__
      CPU_ZERO(&helpers_cpus_);
#endif
    }
  }

  // Keeps helpers off the caller's processor. Linux in a virtual machine does not count processors
  // that have idled for a while as available. It wakes helpers on the waker's processor, where they
  // wait until its time slice ends, perhaps as long as the call. Concurrent callers leave helpers
  // where they are: moving one takes a third of a microsecond, and more while it runs. A caller
  // bound to fewer processors than it has threads, by OpenMP for example, leaves helpers the
  // processors of the process.
  void stay_off_this_cpu([[maybe_unused]] int32_t threads) {
#ifdef __linux__
    const int cpu = sched_getcpu();
    cpu_set_t others;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof others, &others) != 0) return;
    if (CPU_COUNT(&others) < threads) others = processors_of_process();
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0 || CPU_EQUAL(&others, &helpers_cpus_)) return;
    for (const pthread_t helper : helpers_) pthread_setaffinity_np(helper, sizeof others, &others);
    helpers_cpus_ = others;
#endif
  }

  void unlink(Job* job) {
    Job** link = &jobs_;
    while (*link != job) link = &(*link)->next;
    *link = job->next;
  }

  Job* joinable() {
    for (Job* job = jobs_; job != nullptr; job = job->next) {
      if (job->next_worker < job->threads) return job;
    }
    return nullptr;
  }

  [[noreturn]] void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = joinable();
      if (job == nullptr) {
        const uint32_t seen = posted_.load(std::memory_order_relaxed);
        lock.unlock();
        const bool more =
            spin([this, seen] { return posted_.load(std::memory_order_acquire) != seen; });
        lock.lock();
        if (!more) wait(&work_, &lock, [this] { return joinable() != nullptr; });
        continue;
      }
      const int32_t worker = job->next_worker++;
      ++job->inside;
      lock.unlock();
      job->body(job->context, worker);
      lock.lock();
      if (--job->inside == 0) done_.notify_all();
    }
  }

  template <class Ready>
  static bool spin(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (!ready()) {
      relax();
      if (std::chrono::steady_clock::now() >= end) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::atomic<uint32_t> posted_{0};
  Job* jobs_ = nullptr;
  std::vector<pthread_t> helpers_;
#ifdef __linux__
  cpu_set_t helpers_cpus_{};  // where all helpers may run; empty: they differ
#endif
};

// Leaked on purpose: its threads outlive main(). A forked child has none of these threads, and
// perhaps a locked mutex, so it begins with its own pool.
std::atomic<Pool*> current_pool{nullptr};

Pool* pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing != nullptr) return existing;
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
  (void)registered;
  Pool* created = new (std::nothrow) Pool;
  if (created == nullptr) return nullptr;
  if (current_pool.compare_exchange_strong(existing, created)) return created;
  delete created;
  return existing;
}

int32_t default_num_threads() {
  const char* text = std::getenv("FLASHMOE_NUM_THREADS");
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && value >= 1 && value <= kMaxThreads) return static_cast<int32_t>(value);
    std::fprintf(stderr,
                 "flashmoe: FLASHMOE_NUM_THREADS: got \"%s\", accepted are 1 to %d; using every "
                 "processor\n",
                 text, kMaxThreads);
  }
  return std::min(count_processors(), kMaxThreads);
}

std::atomic<int32_t> requested_threads{0};

}  // namespace

int32_t num_threads() {
  const int32_t requested = requested_threads.load(std::memory_order_relaxed);
  if (requested != 0) return requested;
  static const int32_t by_default = default_num_threads();
  return by_default;
}

int32_t set_num_threads(int32_t n) {
  requested_threads.store(n, std::memory_order_relaxed);
  return num_threads();
}

void parallel_run(int32_t threads, void (*body)(void* context, int32_t worker), void* context) {
  Pool* shared = threads > 1 ? pool() : nullptr;
  if (shared == nullptr) {
    body(context, 0);
    return;
  }
  Job job = {body, context, 1, threads, 0, nullptr};
  shared->run(&job);
}

}  // namespace flashmoe::cpu
