// Values that are known to be the same in all lanes of a warp.
#pragma once

#include "cuda/tile/thread.cuh"

namespace flashmoe::moe {

// Makes a value that is the same in all lanes known to be so. Whole warps call it. ptxas then keeps
// what is derived from it in uniform registers, where the copy engine and wgmma take their
// operands. Of other values it makes a loop for each copy.
__device__ __forceinline__ int uniform(int value) {
  return static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<unsigned>(value)));
}

}  // namespace flashmoe::moe
