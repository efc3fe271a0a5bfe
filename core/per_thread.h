// Data that each thread keeps for itself, in memory that it allocates on first use. Thread-local
// storage would lie on the stack of every thread of the process, and threads with small stacks
// could not start.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

namespace flashmoe {

// Memory that is freed when the thread ends, or nullptr. *slot, thread-local, is then set to
// nullptr. Code that runs later while the thread ends may allocate again.
void* allocate_for_thread(size_t bytes, void** slot);

// kThreadAlignment suffices for the parameters of every kernel.
inline constexpr size_t kThreadAlignment = 128;

// This thread's only T, or nullptr if it has none.
template <class T>
class PerThread {
 public:
  // Makes a T() at the first call; nullptr if there is no memory for it.
  static T* get() {
    if (slot() == nullptr) {
      void* const memory = allocate_for_thread(sizeof(T), &slot());
      if (memory != nullptr) slot() = new (memory) T();
    }
    return static_cast<T*>(slot());
  }

  // nullptr before the thread's first get().
  static T* existing() { return static_cast<T*>(slot()); }

 private:
  static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= kThreadAlignment);

  static void*& slot() {
    thread_local void* memory = nullptr;
    return memory;
  }
};

}  // namespace flashmoe
