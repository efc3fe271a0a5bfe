#include "bindings/workspace.h"

#include <cstdlib>
#include <memory>

namespace flashmoe {
namespace {

constexpr size_t kAlignment = 64;

struct Buffer {
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
  size_t bytes = 0;
};

}  // namespace

void* host_workspace(size_t bytes) {
  thread_local Buffer buffer;
  if (bytes > buffer.bytes) {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.bytes = 0;
    buffer.data.reset();  // first, so that old and new never exist together
    buffer.data.reset(std::aligned_alloc(kAlignment, rounded));
    if (buffer.data == nullptr) return nullptr;
    buffer.bytes = rounded;
  }
  return buffer.data.get();
}

flashmoe_status forward_on_host(const flashmoe_attention_forward_params& params) {
  size_t bytes = 0;
  const flashmoe_status status = flashmoe_attention_forward_workspace_size(&params, &bytes);
  if (status != FLASHMOE_OK) return status;
  void* workspace = bytes > 0 ? host_workspace(bytes) : nullptr;
  // Without memory the library says how much was needed: WORKSPACE_TOO_SMALL.
  return flashmoe_attention_forward(&params, workspace, workspace != nullptr ? bytes : 0, nullptr);
}

}  // namespace flashmoe
