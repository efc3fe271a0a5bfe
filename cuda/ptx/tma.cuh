// The copy engine (TMA) copies boxes of a tensor of rank 4 or 5 between global and shared memory.
// One thread issues. Coordinates are in elements, innermost dimension first. Elements outside the
// tensor read as zero and are not written. The tensor map lies in kernel parameters, 64-byte
// aligned. Boxes with 128-byte rows and swizzle begin on multiples of 128 bytes. The position of a
// 16-byte chunk in its row follows from the address alone, as if all boxes were parts of one that
// begins on a multiple of 1024. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// How long lines should stay in the L2, as createpolicy encodes it.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Fetches a box into the L2. It is a hint: loads still see later writes to the tensor.
__device__ __forceinline__ void tma_prefetch(const void* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Completes on `barrier`, which expects the bytes of the whole box, including parts outside the
// tensor.
__device__ __forceinline__ void tma_load(uint32_t destination, const void* map, uint32_t barrier,
                                         uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t destination, const void* map, uint32_t barrier,
                                         uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for every block of the cluster whose bit is set in `blocks`. Destination and barrier
// have the same addresses in each block's shared memory.
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const void* map,
                                                   uint32_t barrier, uint64_t policy,
                                                   uint16_t blocks, int c0, int c1, int c2,
                                                   int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(
          destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// Copies contiguous bytes, a multiple of 16. Source and destination are 16-byte aligned. Completes
// on `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, int bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Copies contiguous bytes of shared memory, a multiple of 16, to a 16-byte aligned address, or adds
// its fp32 numbers to those there. Commit it like tensor stores.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, int bytes,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          destination),
      "r"(source), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_add(void* destination, uint32_t source, int bytes,
                                         uint64_t policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 "
      "[%0], [%1], %2, %3;" ::"l"(destination),
      "r"(source), "r"(bytes), "l"(policy)
      : "memory");
}

// Coordinates must not be negative: the copy engine stops at such a store (but not at such a load).
__device__ __forceinline__ void tma_store(const void* map, uint32_t source, int c0, int c1, int c2,
                                          int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(source)
      : "memory");
}

__device__ __forceinline__ void tma_store(const void* map, uint32_t source, int c0, int c1, int c2,
                                          int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::
          "l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(source)
      : "memory");
}

// Closes the group of this thread's stores since the last commit.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read their sources.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all but the kPending newest groups of this thread's stores have read their sources.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the kPending newest groups of this thread's stores have been written.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's stores have been written.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders ordinary memory accesses before those of the copy engine and wgmma, and the reverse.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// The same for shared memory only.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashmoe::ptx
