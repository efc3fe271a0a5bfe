#include "core/backends.h"
#include "core/moe_dispatch.h"

namespace flashmoe {

// Best first for its devices.
const MoeFamily* const kMoeFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kRouteMoe, &kStreamMoe, &kSm89Moe,
#if FLASHMOE_WITH_SM90
    &kSm90Moe,  // by name alone: as it is, it has not run on a GPU yet
#endif
#endif
    &kCpuMoe,
};
const size_t kMoeFamilyCount = sizeof kMoeFamilies / sizeof kMoeFamilies[0];

}  // namespace flashmoe
