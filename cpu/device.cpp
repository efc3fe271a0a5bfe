// The description of the processor, and the thread count of the C ABI.
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

#if FLASHMOE_CPU_X86
#include <cpuid.h>
#endif

namespace flashmoe {
namespace {

void processor_name(char* name, size_t size) {
#if FLASHMOE_CPU_X86
  constexpr unsigned kBrandFirst = 0x80000002u;
  constexpr unsigned kBrandLeaves = 3;
  unsigned words[4 * kBrandLeaves + 1] = {};
  bool known = true;
  for (unsigned leaf = 0; leaf < kBrandLeaves; ++leaf) {
    unsigned* w = words + 4 * leaf;
    known = known && __get_cpuid(kBrandFirst + leaf, &w[0], &w[1], &w[2], &w[3]) != 0;
  }
  if (known) {
    const char* brand = reinterpret_cast<const char*>(words);
    while (*brand == ' ') ++brand;
    std::snprintf(name, size, "%s", brand);
    for (size_t n = std::strlen(name); n > 0 && name[n - 1] == ' '; --n) name[n - 1] = '\0';
    return;
  }
#endif
  utsname system = {};
  std::snprintf(name, size, "%s", uname(&system) == 0 ? system.machine : "unknown processor");
}

uint64_t positive(long value) { return value > 0 ? static_cast<uint64_t>(value) : 0; }

}  // namespace

flashmoe_status cpu_device_info(flashmoe_device_info* info) {
  cpu::Isa isa;
  char reason[256];
  const flashmoe_status status = cpu::chosen_isa(&isa, Reason(reason));
  if (status != FLASHMOE_OK) return fail(status, "%s", reason);
  // The header promises one name per register width; the plan names the bf16 instructions.
  if (isa == cpu::Isa::kAvx512Bf16 || isa == cpu::Isa::kAmx) isa = cpu::Isa::kAvx512;
  processor_name(info->name, sizeof info->name);
  std::snprintf(info->isa, sizeof info->isa, "%s", cpu::isa_name(isa));
  std::snprintf(info->kernel_family, sizeof info->kernel_family, "%s", kCpuAttention.name);
  info->multiprocessors = cpu::num_threads();
  info->l2_bytes = static_cast<uint64_t>(cpu::level2_bytes());
  info->memory_bytes = positive(sysconf(_SC_PHYS_PAGES)) * positive(sysconf(_SC_PAGESIZE));
  return FLASHMOE_OK;
}

int32_t cpu_set_num_threads(int32_t n) { return cpu::set_num_threads(n); }
int32_t cpu_get_num_threads() { return cpu::num_threads(); }

}  // namespace flashmoe
