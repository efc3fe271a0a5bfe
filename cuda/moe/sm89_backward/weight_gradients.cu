#include "cuda/moe/sm89_backward/weight_gradients.cuh"

#include "cuda/moe/sm89_backward/entry.h"

namespace flashmoe::moe::sm89_backward {

static LoadedKernel loaded[kEntries][kMaxDevices];

template <class Element>
static Entry entry_of(const char* name, int index) {
  using T = Traits<Element>;
  return {{name, reinterpret_cast<const void*>(&weight_gradients_kernel<T>), T::kSharedBytes,
           loaded[index]},
          numeric::ElementTraits<Element>::kDtype,
          T::kTileM,
          T::kTileN,
          T::kStages,
          T::kThreads,
          T::kBlocksPerSm};
}

const Entry entries[kEntries] = {
    entry_of<__half>("moe_backward_sm89_fp16", 0),
    entry_of<__nv_bfloat16>("moe_backward_sm89_bf16", 1),
};

}  // namespace flashmoe::moe::sm89_backward
