#include "cpu/isa.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashmoe::cpu {
namespace {

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

bool processor_has(Isa isa) {
#if FLASHMOE_CPU_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  switch (isa) {
    case Isa::kScalar: return true;
    case Isa::kAvx2: return avx2;
    case Isa::kAvx512: return avx512;
    case Isa::kAvx512Bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return isa == Isa::kScalar;
}

struct Choice {
  Isa isa = Isa::kScalar;
  flashmoe_status status = FLASHMOE_OK;
  char reason[256] = "";
};

Choice choose() {
  Choice choice;
  char available[64] = "";
  for (const Isa isa : kIsas) {
    if (!processor_has(isa)) continue;
    choice.isa = isa;
    const size_t used = std::strlen(available);
    std::snprintf(available + used, sizeof available - used, "%s%s", used == 0 ? "" : ", ",
                  isa_name(isa));
  }
  const char* wanted = std::getenv("FLASHMOE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return choice;
  for (const Isa isa : kIsas) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    choice.isa = isa;
    if (processor_has(isa)) return choice;
    choice.status = FLASHMOE_ERROR_UNSUPPORTED;
    std::snprintf(choice.reason, sizeof choice.reason,
                  "FLASHMOE_CPU_ISA: got \"%s\", this processor and this build have %s", wanted,
                  available);
    return choice;
  }
  choice.status = FLASHMOE_ERROR_INVALID_ARGUMENT;
  std::snprintf(choice.reason, sizeof choice.reason,
                "FLASHMOE_CPU_ISA: got \"%.40s\", accepted are scalar, avx2, avx512 and avx512bf16",
                wanted);
  return choice;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512bf16";
  }
  return "?";
}

flashmoe_status chosen_isa(Isa* isa, const Reason& reason) {
  static const Choice choice = choose();
  *isa = choice.isa;
  if (choice.status == FLASHMOE_OK) return FLASHMOE_OK;
  return reason.refuse(choice.status, "%s", choice.reason);
}

}  // namespace flashmoe::cpu
