#include "cpu/moe.h"

#include "core/backends.h"

namespace flashmoe {
namespace cpu {

const MoeKernel& moe_kernel_for(Isa isa, Dtype dtype) {
#if FLASHMOE_CPU_X86
  if (dtype == Dtype::kFloat64) return isa == Isa::kScalar ? kFp64Moe : kAvx2Fp64Moe;
#else
  if (dtype == Dtype::kFloat64) return kFp64Moe;
#endif
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

flashmoe_launch& add_launch(const char* kernel, const MoeKernel* entry, int64_t tiles,
                            int64_t threads, Plan* plan) {
  return plan->add_launch(kernel, entry, {FLASHMOE_DEVICE_CPU, 0},
                          static_cast<uint32_t>(tiles < UINT32_MAX ? tiles : UINT32_MAX),
                          static_cast<uint32_t>(threads));
}

}  // namespace cpu

const MoeRouteFamily kCpuMoeRoute = {"cpu", FLASHMOE_DEVICE_CPU, cpu::plan_route,
                                     cpu::launch_route};
const MoeForwardFamily kCpuMoeForward = {"cpu", FLASHMOE_DEVICE_CPU, cpu::plan_forward,
                                         cpu::launch_forward};
const GroupedProductFamily kCpuGroupedProduct = {
    "cpu", FLASHMOE_DEVICE_CPU, cpu::plan_grouped_product, cpu::launch_grouped_product};

const MoeRouteBackwardFamily kCpuMoeRouteBackward = {
    "cpu", FLASHMOE_DEVICE_CPU, cpu::plan_route_backward, cpu::launch_route_backward};
const MoeBackwardFamily kCpuMoeBackward = {"cpu", FLASHMOE_DEVICE_CPU, cpu::plan_backward,
                                           cpu::launch_backward};
const GroupedProductBackwardFamily kCpuGroupedProductBackward = {
    "cpu", FLASHMOE_DEVICE_CPU, cpu::plan_grouped_product_backward,
    cpu::launch_grouped_product_backward};

}  // namespace flashmoe
