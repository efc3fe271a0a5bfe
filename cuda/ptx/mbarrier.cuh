// mbarrier: a barrier in shared memory whose arrival and wait are two instructions, so that work can
// stand between them. Phases alternate in parity, from 0 on. sm_80 and newer.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// By one thread, before a block barrier that all users pass. `arrivals` complete a phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// This thread's earlier reads and writes of shared memory happen before the phase completes.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}" ::"r"(barrier)
      : "memory");
}

// Waits until the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace flashmoe::ptx
