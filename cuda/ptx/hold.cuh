// Where values are computed, in the order that ptxas gives to instructions.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Has four registers ready here. ptxas moves arithmetic behind waits and products that come after
// it, up to where its results are used, and keeps what it is made of until then. A store is not
// moved so. This one is never made: `never` is false, which ptxas must not be able to know.
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
