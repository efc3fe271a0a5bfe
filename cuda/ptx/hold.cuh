// Controls where ptxas computes values in its order of instructions.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Has four registers ready here. ptxas moves arithmetic behind later waits and products, up to the
// use of its results, and keeps its inputs alive until then. It does not move a store. This store
// never executes: `never` is false, which ptxas must not be able to prove.
__device__ __forceinline__ void hold(const uint32_t (&registers)[4], uint32_t address, bool never) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.ne.u32 never, %5, 0;\n"
      "@never st.shared.v4.b32 [%4], {%0, %1, %2, %3};\n"
      "}\n" ::"r"(registers[0]),
      "r"(registers[1]), "r"(registers[2]), "r"(registers[3]), "r"(address),
      "r"(static_cast<uint32_t>(never))
      : "memory");
}

}  // namespace flashmoe::ptx
