// Host workspace of CPU calls: one buffer a thread, which grows to the largest call it has seen,
// and memory of its own for a call that needs very much, or that a log's callback makes during
// another.
#pragma once

#include <cstddef>
#include <memory>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// At least `bytes` bytes, 64-byte aligned. Lives on the stack of one thread.
class HostWorkspace {
 public:
  explicit HostWorkspace(size_t bytes);
  HostWorkspace(const HostWorkspace&) = delete;
  HostWorkspace& operator=(const HostWorkspace&) = delete;
  ~HostWorkspace();

  // nullptr when the host is out of memory, or for 0 bytes.
  void* data() const { return data_; }
  // What data() points to: `bytes`, or 0 without memory. The library then says how much it needed.
  size_t bytes() const { return data_ != nullptr ? bytes_ : 0; }

 private:
  void* data_;
  size_t bytes_;
  bool owned_;
};

// An operation of the C ABI on tensors on the CPU, with the workspace it asks for.
template <class Params>
flashmoe_status run_on_host(flashmoe_status (*workspace_size)(const Params*, size_t*),
                            flashmoe_status (*operation)(const Params*, void*, size_t, void*),
                            const Params& params) {
  size_t bytes = 0;
  const flashmoe_status status = workspace_size(&params, &bytes);
  if (status != FLASHMOE_OK) return status;
  const HostWorkspace workspace(bytes);
  return operation(&params, workspace.data(), workspace.bytes(), nullptr);
}

}  // namespace flashmoe
