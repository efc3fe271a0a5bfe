// Clusters of blocks: their barrier, and stores to another block's shared memory that complete on
// an mbarrier there. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Barrier of all threads of the cluster, in two halves, which whole warps call in turn. Arriving
// relaxed orders nothing: fence_mbarrier_init makes earlier initialisations of mbarriers visible to
// the cluster.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Arrives, and makes this thread's writes to shared memory, its own or another block's, visible to
// the cluster.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The rank of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Maps an address of this block's shared memory to the same address in block `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Stores to a mapped address.
__device__ __forceinline__ void store_to_rank(uint32_t address, int32_t value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Stores 4, 8 or 16 aligned bytes at a mapped address and completes so many bytes on the mbarrier,
// which is mapped to the same block. Asynchronous: a thread sees the bytes after it has waited at
// that mbarrier.
__device__ __forceinline__ void store_async(uint32_t address, float2 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(address),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, int32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(value), "r"(barrier)
      : "memory");
}

// Arrives at a mapped barrier, of this or another block of the cluster. The arrival does not order
// this thread's own memory accesses for the other block. It only says that asynchronous accesses,
// for which this thread has waited, are complete.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Copies contiguous bytes of this block's shared memory, a multiple of 16, to a mapped, 16-byte
// aligned address. Completes on the barrier, which is mapped to the same block.
__device__ __forceinline__ void bulk_copy_to_rank(uint32_t destination, uint32_t source, int bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Waits until the phase of this parity is over at a barrier of this block to which other blocks of
// the cluster contribute.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace flashmoe::ptx
