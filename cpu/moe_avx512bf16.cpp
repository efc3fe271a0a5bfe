// The mixture-of-experts kernels compiled for AVX-512 with vdpbf16ps.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512bf16 {

#include "cpu/simd_avx512.h"
// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/bf16_pair_product.h"
#include "cpu/moe_activation.h"
#include "cpu/moe_sums.h"
#include "cpu/dot_rows.h"
#include "cpu/moe_few_rows.h"
#include "cpu/moe_gradient_rows.h"
#include "cpu/moe_outer_products.h"
#include "cpu/moe_product.h"
// clang-format on

}  // namespace avx512bf16
}  // namespace

const MoeKernel kAvx512Bf16Moe = avx512bf16::moe_kernel<avx512bf16::Bf16PairProduct>("avx512bf16");

}  // namespace flashmoe::cpu
