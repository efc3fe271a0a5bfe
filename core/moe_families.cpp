#include "core/backends.h"
#include "core/moe_dispatch.h"

namespace flashmoe {

// Best first for its devices.
const MoeFamily* const kMoeFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kRouteMoe,
    &kStreamMoe,
    &kSm89Moe,
#endif
    &kCpuMoe,
};
const size_t kMoeFamilyCount = sizeof kMoeFamilies / sizeof kMoeFamilies[0];

}  // namespace flashmoe
