// A word by which blocks tell each other how far they are, asked ahead of the time when the answer
// is needed. sm_70 and newer.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Waits for nothing: the word is waited for where it is used.
__device__ __forceinline__ uint32_t load_relaxed_word(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  return word;
}

// Behind a relaxed load of what another block stored by store_release: with the word comes all that
// the other has written or seen before.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace flashmoe::ptx
