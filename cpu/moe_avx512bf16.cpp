// The mixture-of-experts kernels compiled for AVX-512 with vdpbf16ps.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512bf16 {

#include "cpu/simd_avx512.h"
// Built on the Simd above.
#include "cpu/moe_product.h"

}  // namespace avx512bf16
}  // namespace

const MoeKernel kAvx512Bf16Moe = avx512bf16::moe_kernel<Bf16>("avx512bf16");

}  // namespace flashmoe::cpu
