// Host workspace of CPU calls. Each thread has one buffer, which grows to its largest call. A call
// gets separate memory if it needs very much, or if a log's callback makes it during another call.
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
  // The size of data(): `bytes`, or 0 if memory ran out. The library then reports how much it
  // needed.
  size_t bytes() const { return data_ != nullptr ? bytes_ : 0; }

 private:
  void* data_;
  size_t bytes_;
  bool owned_;
};

// Runs an operation of the C ABI on CPU tensors, with the workspace it asks for.
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
