// cp.async: 16 bytes from global to shared memory, past the L1 and without registers. Both
// addresses are 16-byte aligned. sm_80 and newer.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Copies if `valid`. Otherwise writes 16 zero bytes and does not access the source.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t destination, const void* source,
                                                    bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}

// Copies if `valid`. Otherwise leaves the destination unchanged and does not access the source. No
// branch.
__device__ __forceinline__ void cp_async_16_if(uint32_t destination, const void* source,
                                               bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %2, 0;\n"
      "@valid cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}\n" ::"r"(destination),
      "l"(source), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// The same through the L1, for data that other warps of the multiprocessor also read.
__device__ __forceinline__ void cp_async_cached_16_or_zero(uint32_t destination, const void* source,
                                                           bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}

// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most the kPending newest groups of this thread are pending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at an mbarrier once this thread's copies so far are done. This is one of the arrivals
// that the barrier was initialised with. Before the copy engine or wgmma reads the copies, call
// fence_proxy_async.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace flashmoe::ptx
