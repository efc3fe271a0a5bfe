#include "bindings/workspace.h"

#include <cstdlib>

namespace flashmoe {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMostKept = size_t{64} << 20;  // per thread, between calls

struct Buffer {
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
  size_t bytes = 0;
  bool used = false;
};

Buffer& of_this_thread() {
  thread_local Buffer buffer;
  return buffer;
}

void* allocate(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return rounded >= bytes ? std::aligned_alloc(kAlignment, rounded) : nullptr;
}

// nullptr if memory runs out.
void* use_buffer_of_this_thread(size_t bytes) {
  Buffer& buffer = of_this_thread();
  if (bytes > buffer.bytes) {
    buffer.bytes = 0;
    buffer.data.reset();  // first, so that old and new never coexist
    buffer.data.reset(allocate(bytes));
    if (buffer.data == nullptr) return nullptr;
    buffer.bytes = bytes;
  }
  buffer.used = true;
  return buffer.data.get();
}

}  // namespace

HostWorkspace::HostWorkspace(size_t bytes)
    : data_(nullptr), bytes_(bytes), owned_(bytes > kMostKept || of_this_thread().used) {
  if (bytes > 0) data_ = owned_ ? allocate(bytes) : use_buffer_of_this_thread(bytes);
}

HostWorkspace::~HostWorkspace() {
  if (owned_) {
    std::free(data_);
  } else if (data_ != nullptr) {
    of_this_thread().used = false;
  }
}

}  // namespace flashmoe
