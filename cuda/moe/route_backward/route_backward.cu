#include "cuda/moe/route_backward/route_backward.cuh"

#include "cuda/moe/route_backward/entry.h"

namespace flashmoe::moe_route_backward {

static LoadedKernel loaded[kMaxDevices];

const Kernel kernel = {"moe_route_backward", reinterpret_cast<const void*>(&route_backward_kernel),
                       kMaxSharedBytes, loaded};

}  // namespace flashmoe::moe_route_backward
