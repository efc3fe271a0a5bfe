// The attention kernels, forward and backward, compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

#include "cpu/simd_avx2.h"
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

}  // namespace avx2
}  // namespace

const AttentionKernel kAvx2Attention[3] = {
    avx2::attention_kernel<avx2::Fp32Product<float>>("avx2"),
    avx2::attention_kernel<avx2::Fp32Product<Fp16>>("avx2"),
    avx2::attention_kernel<avx2::Fp32Product<Bf16>>("avx2"),
};

const AttentionBackwardKernel kAvx2AttentionBackward[3] = {
    avx2::attention_backward_kernel<avx2::Fp32Product<float>>("avx2"),
    avx2::attention_backward_kernel<avx2::Fp32Product<Fp16>>("avx2"),
    avx2::attention_backward_kernel<avx2::Fp32Product<Bf16>>("avx2"),
};

}  // namespace flashmoe::cpu
