// The bf16 attention kernels, forward and backward, compiled for AVX-512 with vdpbf16ps: two
// products of bf16 pairs per lane and instruction, summed in fp32. Denormal inputs and sums count
// as 0.
#include <immintrin.h>

#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {
namespace avx512bf16 {

#include "cpu/simd_avx512.h"
// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/bf16_pair_product.h"
#include "cpu/dot_rows.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_pack.h"
#include "cpu/attention_tile.h"
#include "cpu/attention_few_rows.h"
#include "cpu/attention_backward_rows.h"
#include "cpu/attention_backward_step.h"
#include "cpu/attention_compute.h"
// clang-format on

}  // namespace avx512bf16
}  // namespace

const AttentionKernel kAvx512Bf16Attention =
    avx512bf16::attention_kernel<avx512bf16::Bf16PairProduct>("avx512bf16");

const AttentionBackwardKernel kAvx512Bf16AttentionBackward =
    avx512bf16::attention_backward_kernel<avx512bf16::Bf16PairProduct>("avx512bf16");

}  // namespace flashmoe::cpu
