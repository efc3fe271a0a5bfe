// The instruction sets the CPU kernels are compiled for, and which of them this process uses.
#pragma once

#include <cstdint>

#include "core/status.h"

namespace flashmoe::cpu {

// In ascending order of preference. Each is a superset of the ones before it.
enum class Isa : int32_t {
  kScalar,      // the compiler's baseline: SSE2 on x86-64, NEON on AArch64
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16,  // and vdpbf16ps; for bf16 only, and on Intel only on request
  kAmx,         // and tiles with tdpbf16ps; for bf16 only
};

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512bf16", "amx"

// The best set of the processor and this build, or the one that FLASHMOE_CPU_ISA asks for; decided
// once. An error goes to `reason` as a sentence.
flashmoe_status chosen_isa(Isa* isa, const Reason& reason);

// Size of a core's level-2 cache; 0 if the system does not say.
int64_t level2_bytes();

}  // namespace flashmoe::cpu
