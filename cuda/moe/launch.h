// What the mixture-of-experts families share on the host: the launches that a plan lists.
#pragma once

#include <cstdint>

#include "core/moe.h"
#include "cuda/launch.h"

namespace flashmoe {

// Appends a launch of `blocks` blocks of a kernel, which load_kernel has loaded on the device, to a
// plan that has room for it; `shared_bytes` are dynamic ones. Returns the plan's stage: more
// dimensions of the grid, a cluster and tiles are the caller's to say. `suffix` is that of the code's
// architecture: "a" for sm_90a, or "".
flashmoe_moe_stage* add_stage(const Kernel& kernel, int device_id, const char* suffix,
                              int64_t blocks, int threads, int shared_bytes, MoePlan* plan);

// Launches stage `index` of a plan with its kernel's one argument, which is copied, on `device`,
// which is current. Where the code has programmatic launches it may begin before what is ahead of it
// has ended, if it is `early`: every kernel here waits (cuda/ptx/pdl.cuh).
flashmoe_status launch_stage(const MoePlan& plan, int index, flashmoe_device device,
                             const void* params, void* stream, bool early = true);

}  // namespace flashmoe
