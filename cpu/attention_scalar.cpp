// The attention kernels, forward and backward, compiled for the platform's baseline.
#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {
namespace scalar {

#include "cpu/simd_portable.h"
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

}  // namespace scalar
}  // namespace

const AttentionKernel kScalarAttention[3] = {
    scalar::attention_kernel<scalar::Fp32Product<float>>("scalar"),
    scalar::attention_kernel<scalar::Fp32Product<Fp16>>("scalar"),
    scalar::attention_kernel<scalar::Fp32Product<Bf16>>("scalar"),
};

const AttentionBackwardKernel kScalarAttentionBackward[3] = {
    scalar::attention_backward_kernel<scalar::Fp32Product<float>>("scalar"),
    scalar::attention_backward_kernel<scalar::Fp32Product<Fp16>>("scalar"),
    scalar::attention_backward_kernel<scalar::Fp32Product<Bf16>>("scalar"),
};

}  // namespace flashmoe::cpu
