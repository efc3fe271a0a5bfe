#include "cpu/isa.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if FLASHMOE_CPU_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace flashmoe::cpu {
namespace {

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

#if FLASHMOE_CPU_X86
// Whether there are bf16 tiles and the system lets this process use them. The process must ask
// once, since tiles add 8 KiB to a thread's saved state.
bool may_use_amx() {
#if FLASHMOE_CPU_AMX
  constexpr unsigned kFeatures = 7;
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0 &&
         (edx & kAmxTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
    case Isa::kAmx: return avx512 && __builtin_cpu_supports("avx512bf16") && may_use_amx();
  }
#endif
  return isa == Isa::kScalar;
}

// Whether an instruction set of the processor is also faster than the one before. Intel's cores
// issue vdpbf16ps every second cycle but two FMAs per cycle, so pairs take twice as long as numbers
// widened to fp32.
bool prefers(Isa isa) {
#if FLASHMOE_CPU_X86
  if (isa == Isa::kAvx512Bf16) return !__builtin_cpu_is("intel");
#endif
  return true;
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
    if (prefers(isa)) choice.isa = isa;
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
  std::snprintf(
      choice.reason, sizeof choice.reason,
      "FLASHMOE_CPU_ISA: got \"%.40s\", accepted are scalar, avx2, avx512, avx512bf16 and "
      "amx",
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
    case Isa::kAmx: return "amx";
  }
  return "?";
}

flashmoe_status chosen_isa(Isa* isa, const Reason& reason) {
  static const Choice choice = choose();
  *isa = choice.isa;
  if (choice.status == FLASHMOE_OK) return FLASHMOE_OK;
  return reason.refuse(choice.status, "%s", choice.reason);
}

int64_t level2_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t bytes = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 0);
  return bytes;
#else
  return 0;
#endif
}

}  // namespace flashmoe::cpu
