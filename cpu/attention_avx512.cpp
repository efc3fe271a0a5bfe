// The attention kernels, forward and backward, compiled for AVX-512.
#include <immintrin.h>

#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {
namespace avx512 {

#include "cpu/simd_avx512.h"
// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/dot_rows.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_pack.h"
#include "cpu/attention_tile.h"
#include "cpu/attention_few_rows.h"
#include "cpu/attention_backward_rows.h"
#include "cpu/attention_backward_step.h"
#include "cpu/attention_compute.h"
// clang-format on

}  // namespace avx512
}  // namespace

const AttentionKernel kAvx512Attention[3] = {
    avx512::attention_kernel<avx512::Fp32Product<float>>("avx512"),
    avx512::attention_kernel<avx512::Fp32Product<Fp16>>("avx512"),
    avx512::attention_kernel<avx512::Fp32Product<Bf16>>("avx512"),
};

const AttentionBackwardKernel kAvx512AttentionBackward[3] = {
    avx512::attention_backward_kernel<avx512::Fp32Product<float>>("avx512"),
    avx512::attention_backward_kernel<avx512::Fp32Product<Fp16>>("avx512"),
    avx512::attention_backward_kernel<avx512::Fp32Product<Bf16>>("avx512"),
};

}  // namespace flashmoe::cpu
