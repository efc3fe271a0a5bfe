// Arriving at the mbarrier of another block of the cluster behind what this thread has read and
// written there or here. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// At a mapped barrier; seen by who waits there by mbarrier_wait_cluster.
__device__ __forceinline__ void mbarrier_arrive_behind_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

}  // namespace flashmoe::ptx
