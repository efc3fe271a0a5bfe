// setmaxnreg: a warpgroup releases registers, or waits for more. All of its warps take part. Counts
// are multiples of 8 from 24 to 256. sm_90a.
#pragma once

namespace flashmoe::ptx {

template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashmoe::ptx
