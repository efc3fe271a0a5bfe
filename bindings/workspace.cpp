#include "bindings/workspace.h"

#include <cstdlib>

namespace flashmoe {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMostKept = size_t{64} << 20;  // of a thread, between calls

struct Buffer {
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
  size_t bytes = 0;
};

void* allocate(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return rounded >= bytes ? std::aligned_alloc(kAlignment, rounded) : nullptr;
}

void* kept_by_this_thread(size_t bytes) {
  thread_local Buffer buffer;
  if (bytes > buffer.bytes) {
    buffer.bytes = 0;
    buffer.data.reset();  // first, so that old and new never exist together
    buffer.data.reset(allocate(bytes));
    if (buffer.data == nullptr) return nullptr;
    buffer.bytes = bytes;
  }
  return buffer.data.get();
}

}  // namespace

HostWorkspace::HostWorkspace(size_t bytes)
    : data_(nullptr), bytes_(bytes), owned_(bytes > kMostKept) {
  if (bytes > 0) data_ = owned_ ? allocate(bytes) : kept_by_this_thread(bytes);
}

HostWorkspace::~HostWorkspace() {
  if (owned_) std::free(data_);
}

}  // namespace flashmoe
