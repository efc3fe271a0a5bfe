// The mixture-of-experts kernels compiled for AMX. They use tiles; for few rows some use vdpbf16ps.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace amx {

namespace avx512 {
#include "cpu/simd_avx512.h"
}  // namespace avx512

struct Simd : avx512::Simd {
  static constexpr int kGroupRows = 16;  // rows of a tile
};

// Each is built on those above it.
// clang-format off
#include "cpu/products.h"
#include "cpu/bf16_pair_product.h"
#include "cpu/amx_registers.h"
#include "cpu/moe_activation.h"
#include "cpu/moe_sums.h"
#include "cpu/dot_rows.h"
#include "cpu/moe_few_rows.h"
#include "cpu/moe_gradient_rows.h"
#include "cpu/moe_outer_products.h"
#include "cpu/moe_amx.h"
#include "cpu/moe_outer_tiles.h"
// clang-format on

}  // namespace amx
}  // namespace

const MoeKernel kAmxMoe = amx::tiled_kernel("amx");

}  // namespace flashmoe::cpu
