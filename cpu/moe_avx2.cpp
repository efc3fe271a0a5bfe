// The mixture-of-experts kernels compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

#include "cpu/simd_avx2.h"
// Built on the Simd above.
#include "cpu/moe_product.h"

}  // namespace avx2
}  // namespace

const MoeKernel kAvx2Moe[3] = {
    avx2::moe_kernel<float>("avx2"),
    avx2::moe_kernel<Fp16>("avx2"),
    avx2::moe_kernel<Bf16>("avx2"),
};

}  // namespace flashmoe::cpu
