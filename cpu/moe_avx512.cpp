// The mixture-of-experts kernels compiled for AVX-512.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512 {

#include "cpu/simd_avx512.h"
// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/moe_activation.h"
#include "cpu/moe_sums.h"
#include "cpu/dot_rows.h"
#include "cpu/moe_few_rows.h"
#include "cpu/moe_gradient_rows.h"
#include "cpu/moe_outer_products.h"
#include "cpu/moe_product.h"
// clang-format on

}  // namespace avx512
}  // namespace

const MoeKernel kAvx512Moe[3] = {
    avx512::moe_kernel<avx512::Fp32Product<float>>("avx512"),
    avx512::moe_kernel<avx512::Fp32Product<Fp16>>("avx512"),
    avx512::moe_kernel<avx512::Fp32Product<Bf16>>("avx512"),
};

}  // namespace flashmoe::cpu
