// The mixture of experts in fp64, compiled for the platform's baseline.
#include <cmath>

#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace baseline {

constexpr int kVectorBytes = 16;
constexpr int64_t kGroupRows = 2;  // 2 x 4 accumulators, 4 operands and 2 factors in 16 registers

#include "cpu/moe_fp64.h"

}  // namespace baseline
}  // namespace

const MoeKernel kFp64Moe = baseline::fp64_moe_kernel("scalar");

}  // namespace flashmoe::cpu
