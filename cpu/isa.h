// The instruction sets the CPU kernels are compiled for, and which of them this process uses.
#pragma once

#include <cstdint>

#include "core/status.h"

namespace flashmoe::cpu {

// In order of preference, the last first. Each is a superset of the ones before it.
enum class Isa : int32_t {
  kScalar,      // what the compiler's baseline gives: SSE2 on x86-64, NEON on AArch64
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16,  // and vdpbf16ps; used for bf16 only, and on Intel's processors only when asked for
  kAmx,         // and tiles with tdpbf16ps; used for experts in bf16 only
};

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512bf16", "amx"

// The best the processor and this build have, or what FLASHMOE_CPU_ISA asks for; decided once. On
// error gives a sentence to `reason`.
flashmoe_status chosen_isa(Isa* isa, const Reason& reason);

// The second level of a core's cache; 0 where the system does not say.
int64_t level2_bytes();

}  // namespace flashmoe::cpu
