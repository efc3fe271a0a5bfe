// The mixture-of-experts kernels compiled for the platform's baseline.
#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace scalar {

#include "cpu/simd_portable.h"
// Built on the Simd above.
#include "cpu/moe_product.h"

}  // namespace scalar
}  // namespace

const MoeKernel kScalarMoe[3] = {
    scalar::moe_kernel<float>("scalar"),
    scalar::moe_kernel<Fp16>("scalar"),
    scalar::moe_kernel<Bf16>("scalar"),
};

}  // namespace flashmoe::cpu
