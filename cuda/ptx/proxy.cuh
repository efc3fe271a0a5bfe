// Fences between ordinary accesses and those of the copy engine, of global memory alone.
#pragma once

namespace flashmoe::ptx {

// As fence_proxy_async (tma.cuh), which waits besides until all that the thread has written is
// seen by the whole GPU: ptxas makes MEMBAR.ALL.GPU of it, and of this one nothing but the fence
// itself. Behind a load that acquires it is enough.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flashmoe::ptx
