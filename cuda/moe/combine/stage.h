// The last stage of a mixture-of-experts layer, for families that leave the experts' rows in a
// workspace: out[t] = sum_k weights[t, k] * y[slots[t, k]].
#pragma once

#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "cuda/runtime.h"

namespace flashmoe {

// Appends the stage to a plan. It takes fp16 and bf16.
flashmoe_status add_combine(const MoeForwardProblem& problem, const DeviceFacts& facts, Plan* plan,
                            const Reason& reason);

// Launches stage `index` of the plan on the current device, which is the problem's. y has shape
// [tokens * top_k, hidden] and out's dtype; its rows are y_stride elements apart and 16-byte
// aligned.
flashmoe_status launch_combine(const MoeForwardProblem& problem, const Plan& plan, int index,
                               const void* y, int64_t y_stride, void* stream);

}  // namespace flashmoe
