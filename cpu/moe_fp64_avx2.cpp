// The mixture of experts in fp64, compiled for AVX2 and FMA.
#include <cmath>

#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

constexpr int kVectorBytes = 32;
constexpr int64_t kGroupRows = 4;  // 4 x 2 accumulators, 2 operands and 4 factors in 16 registers

#include "cpu/moe_fp64.h"

}  // namespace avx2
}  // namespace

const MoeKernel kAvx2Fp64Moe = avx2::fp64_moe_kernel("avx2");

}  // namespace flashmoe::cpu
