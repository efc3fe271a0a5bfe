#include "core/backends.h"
#include "core/moe_dispatch.h"

namespace flashmoe {

// Best first for its devices.
const MoeFamily* const kMoeFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kRouteMoe, &kStreamMoe, &kSm89Moe,
#if FLASHMOE_WITH_SM90
    &kSm90Moe,  // by name alone: its kernels are tested, the library with them is not yet
#endif
#endif
    &kCpuMoe,
};
const size_t kMoeFamilyCount = sizeof kMoeFamilies / sizeof kMoeFamilies[0];

}  // namespace flashmoe
