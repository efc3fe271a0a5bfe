// The mixture-of-experts kernels compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

#include "cpu/simd_avx2.h"
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

}  // namespace avx2
}  // namespace

const MoeKernel kAvx2Moe[3] = {
    avx2::moe_kernel<avx2::Fp32Product<float>>("avx2"),
    avx2::moe_kernel<avx2::Fp32Product<Fp16>>("avx2"),
    avx2::moe_kernel<avx2::Fp32Product<Bf16>>("avx2"),
};

}  // namespace flashmoe::cpu
