// Arrives at the mbarrier of another block of the cluster after this thread's reads and writes
// there and here. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// `barrier` is mapped. mbarrier_wait_cluster sees the arrival and what comes before it.
__device__ __forceinline__ void mbarrier_arrive_behind_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

}  // namespace flashmoe::ptx
