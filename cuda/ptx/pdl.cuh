// Programmatic dependent launch (griddepcontrol): a kernel that was launched with the attribute
// programmaticStreamSerialization may start before the one in front of it in the stream is done.
// sm_90. Without the attribute of its own launch a kernel has nothing to wait for; what it says to
// its dependents depends on the attribute of theirs.
//
// Safe because every thread of such a kernel waits here before its first access to global memory:
// the wait ends when the kernels before it are done and what they wrote is visible (PTX ISA,
// griddepcontrol.wait). A fetch into the L2, which gives nothing, may come before. Global memory is
// then read by plain loads, since ld.global.nc promises that nothing writes it for the kernel's
// whole duration, of which the wait is part. And since no block ends without waiting, a kernel that
// is done says that all before it are. A kernel lets the next one start only after its own wait: a
// library that reads what it takes for constant before it waits may count on everything but the
// kernel right in front of it. So do a layer's second product, told by the first, tile by tile,
// what that wrote (moe/sm90/product.cuh), and prompts beside decoding (cuda/attention/division.h).
#pragma once

namespace flashmoe::ptx {

// To the kernel behind this one: it may start as soon as all blocks of this one have said so.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// For what the kernels in front of this one wrote, and for what they still read.
__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flashmoe::ptx
