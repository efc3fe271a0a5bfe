// The mixture-of-experts kernels compiled for the platform's baseline.
#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace scalar {

#include "cpu/simd_portable.h"
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

}  // namespace scalar
}  // namespace

const MoeKernel kScalarMoe[3] = {
    scalar::moe_kernel<scalar::Fp32Product<float>>("scalar"),
    scalar::moe_kernel<scalar::Fp32Product<Fp16>>("scalar"),
    scalar::moe_kernel<scalar::Fp32Product<Bf16>>("scalar"),
};

}  // namespace flashmoe::cpu
