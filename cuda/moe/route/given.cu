// Routing by given ids, and the second launch, which does not depend on how experts were chosen.
#include "cuda/moe/route/entry.h"
#include "cuda/moe/route/place.cuh"
#include "cuda/moe/route/route.cuh"

namespace flashmoe::moe_route {

static LoadedKernel once_loaded[kMaxDevices];
static LoadedKernel choose_loaded[kMaxDevices];
static int most_blocks[kMaxDevices];
static LoadedKernel place_loaded[kMaxDevices];

extern const Entry entry_given;
const Entry entry_given = {
    {"moe_route_once_given", reinterpret_cast<const void*>(&route_once_kernel<GivenChooser>),
     kMaxSharedBytes, once_loaded},
    {"moe_route_choose_given", reinterpret_cast<const void*>(&route_choose_kernel<GivenChooser>),
     kMaxSharedBytes, choose_loaded},
    kLastExpert + 1,
    true,
    GivenChooser::kThreads,
    &GivenChooser::scratch_words,
    &Shared::bytes<GivenChooser, true>,
    &Shared::bytes<GivenChooser, false>,
    most_blocks,
};

extern const Kernel kernel_place;
const Kernel kernel_place = {"moe_route_place", reinterpret_cast<const void*>(&route_place_kernel),
                             0, place_loaded};

}  // namespace flashmoe::moe_route
