// The bf16 attention kernels, forward and backward, compiled for AMX. They use tiles, except that
// forward of few rows widens to fp32 and uses FMAs.
#include <immintrin.h>

#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {
namespace amx {

namespace avx512 {
#include "cpu/simd_avx512.h"
}  // namespace avx512

struct Simd : avx512::Simd {
  static constexpr int kGroupRows = 32;  // two tiles
};

// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/bf16_pair_product.h"
#include "cpu/amx_registers.h"
#include "cpu/amx_tiles.h"
#include "cpu/dot_rows.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_pack.h"
#include "cpu/attention_few_rows.h"
#include "cpu/attention_amx.h"
#include "cpu/attention_backward_rows.h"
#include "cpu/attention_backward_amx.h"
// clang-format on

}  // namespace amx
}  // namespace

const AttentionKernel kAmxAttention = amx::kAmxKernel;

const AttentionBackwardKernel kAmxAttentionBackward = amx::kAmxBackwardKernel;

}  // namespace flashmoe::cpu
