// Fences between ordinary accesses to global memory and those of the copy engine.
#pragma once

namespace flashmoe::ptx {

// Like fence_proxy_async (tma.cuh), but for global memory only. That one also waits until the whole
// GPU sees all writes of the thread: ptxas emits MEMBAR.ALL.GPU for it. For this one ptxas emits
// only the fence itself, which is enough after an acquiring load.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flashmoe::ptx
