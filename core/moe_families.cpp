#include "core/backends.h"
#include "core/moe_dispatch.h"

namespace flashmoe {

// Best first for its devices, but for calls with which a family yields to those behind it.
const MoeFamily* const kMoeFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kRouteMoe, &kStreamMoe,
#if FLASHMOE_WITH_SM90
    &kSm90Moe,
#endif
    &kSm89Moe,
#endif
    &kCpuMoe,
};
const size_t kMoeFamilyCount = sizeof kMoeFamilies / sizeof kMoeFamilies[0];

}  // namespace flashmoe
