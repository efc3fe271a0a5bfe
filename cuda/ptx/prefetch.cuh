// prefetch: loads a line of global memory into the L2. It is a hint and returns nothing.
#pragma once

namespace flashmoe::ptx {

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace flashmoe::ptx
