// Programmatic dependent launch (griddepcontrol): a kernel launched with the attribute
// programmaticStreamSerialization may start before its predecessor in the stream has ended. sm_90.
// Without the attribute on its own launch a kernel does not wait. Its signal to dependents takes
// effect if their launches have the attribute.
//
// This is safe because every thread of such a kernel waits here before its first access to global
// memory. The wait ends when the earlier kernels have ended and their writes are visible (PTX ISA,
// griddepcontrol.wait). Prefetches into the L2, which return nothing, may come before the wait.
// Plain loads read global memory afterwards: ld.global.nc promises that nothing writes the data
// during the whole kernel, which includes the wait. No block ends without waiting, so the end of a
// kernel implies the end of all kernels before it. A kernel lets the next one start only after its
// own wait. So a library that reads supposed constants before its wait races only with the kernel
// directly in front of it. A layer's second product reads before its wait, too: the first one tells
// it, tile by tile, what it has written (moe/sm90/product.cuh). So do prompts beside decoding
// (cuda/attention/division.h).
#pragma once

namespace flashmoe::ptx {

// Lets the next kernel start once all blocks of this one have called it.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// Waits for the writes and the reads of the kernels in front of this one.
__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flashmoe::ptx
