// Host workspace of CPU calls: one buffer a thread, which grows to the largest call it has seen.
#pragma once

#include <cstddef>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// At least `bytes` bytes of this thread, 64-byte aligned, or nullptr when the host is out of memory.
// Valid until the next call on this thread.
void* host_workspace(size_t bytes);

// flashmoe_attention_forward of tensors on the CPU, with the workspace it asks for.
flashmoe_status forward_on_host(const flashmoe_attention_forward_params& params);

}  // namespace flashmoe
