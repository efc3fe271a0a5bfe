// The mixture-of-experts kernels compiled for AVX-512.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512 {

#include "cpu/simd_avx512.h"
// Built on the Simd above.
#include "cpu/moe_product.h"

}  // namespace avx512
}  // namespace

const MoeKernel kAvx512Moe[3] = {
    avx512::moe_kernel<float>("avx512"),
    avx512::moe_kernel<Fp16>("avx512"),
    avx512::moe_kernel<Bf16>("avx512"),
};

}  // namespace flashmoe::cpu
