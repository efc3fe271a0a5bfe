// What threads keep apart, in memory that each asks for when it first needs it. Thread-local
// storage would be part of every thread of the process: of those with small stacks too, on which it
// lies, and of which none could be started with it.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

namespace flashmoe {

// Memory that is freed when the thread ends, and *slot, thread-local, is set to nullptr with it; or
// nullptr. What runs later in that thread's end may ask again.
void* allocate_for_thread(size_t bytes, void** slot);

// kThreadAlignment suffices for the parameters of every kernel.
inline constexpr size_t kThreadAlignment = 128;

// This thread's only T, or nullptr if it has none.
template <class T>
class PerThread {
 public:
  // Made at the first call, as by T(); nullptr if there is no memory for it.
  static T* get() {
    if (slot() == nullptr) {
      void* const memory = allocate_for_thread(sizeof(T), &slot());
      if (memory != nullptr) slot() = new (memory) T();
    }
    return static_cast<T*>(slot());
  }

  // nullptr before the first get() of the thread.
  static T* existing() { return static_cast<T*>(slot()); }

 private:
  static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= kThreadAlignment);

  static void*& slot() {
    thread_local void* memory = nullptr;
    return memory;
  }
};

}  // namespace flashmoe
