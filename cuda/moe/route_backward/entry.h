// The kernel of routing's gradients, as the host sees it.
#pragma once

#include "core/ops/moe/problem.h"
#include "cuda/launch.h"
#include "cuda/moe/route_backward/params.h"

namespace flashmoe::moe_route_backward {

inline constexpr int kMaxSharedBytes = kWarps * static_cast<int>(kMaxExperts) * 4;

extern const Kernel kernel;

}  // namespace flashmoe::moe_route_backward
