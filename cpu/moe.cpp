#include "cpu/moe.h"

#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/launch.h"

namespace flashmoe {
namespace cpu {

const MoeKernel& moe_kernel_for(Isa isa, Dtype dtype) {
  const int index = static_cast<int>(dtype);
  switch (isa) {
#if FLASHMOE_CPU_X86
#if FLASHMOE_CPU_AMX
    case Isa::kAmx: return dtype == Dtype::kBFloat16 ? kAmxMoe : kAvx512Moe[index];
#endif
    case Isa::kAvx512Bf16: return dtype == Dtype::kBFloat16 ? kAvx512Bf16Moe : kAvx512Moe[index];
    case Isa::kAvx512: return kAvx512Moe[index];
    case Isa::kAvx2: return kAvx2Moe[index];
#endif
    default: return kScalarMoe[index];
  }
}

void add_stage(const char* kernel, int64_t tiles, int64_t threads, flashmoe_moe_stage* stage) {
  std::snprintf(stage->kernel, sizeof stage->kernel, "%s", kernel);
  stage->grid[0] = static_cast<uint32_t>(tiles < UINT32_MAX ? tiles : UINT32_MAX);
  stage->block[0] = static_cast<uint32_t>(threads);
  stage->grid[1] = stage->grid[2] = stage->block[1] = stage->block[2] = 1;
}

void record_launch(const flashmoe_moe_stage& stage, flashmoe_device device) {
  LaunchRecord& record = last_launch_record();
  record = {};
  record.info = flashmoe_launch_init();
  std::memcpy(record.info.kernel, stage.kernel, sizeof record.info.kernel);
  record.info.device = device;
  std::memcpy(record.info.grid, stage.grid, sizeof record.info.grid);
  std::memcpy(record.info.block, stage.block, sizeof record.info.block);
}

}  // namespace cpu

const MoeFamily kCpuMoe = {"cpu",
                           FLASHMOE_DEVICE_CPU,
                           {cpu::plan_route, cpu::launch_route},
                           {cpu::plan_forward, cpu::launch_forward},
                           {cpu::plan_grouped_product, cpu::launch_grouped_product}};

}  // namespace flashmoe
