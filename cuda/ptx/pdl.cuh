// Programmatic dependent launch (griddepcontrol): a kernel that was launched with the attribute
// programmaticStreamSerialization may start before the one in front of it in the stream is done.
// sm_90; without the attribute both do nothing.
//
// Safe because every thread of such a kernel waits here before its first access to global memory:
// the wait ends when the kernels before it are done and what they wrote is visible (PTX ISA,
// griddepcontrol.wait). Global memory is then read by plain loads, since ld.global.nc promises that
// nothing writes it for the kernel's whole duration, of which the wait is part. And since no thread
// leaves without waiting, a kernel that is done says that all before it are.
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
