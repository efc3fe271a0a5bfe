// Rotation of rows appended to a cache, compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/kv_append_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

#include "cpu/simd_avx2.h"
// Builds on the header above.
#include "cpu/kv_append_rows.h"

}  // namespace avx2
}  // namespace

const RotationKernel kAvx2Rotation[3][2] = {
    {{"avx2", avx2::rotate_heads<float, float>}, {"avx2", avx2::rotate_heads<float, float>}},
    {{"avx2", avx2::rotate_heads<Fp16, Fp16>}, {"avx2", avx2::rotate_heads<Fp16, float>}},
    {{"avx2", avx2::rotate_heads<Bf16, Bf16>}, {"avx2", avx2::rotate_heads<Bf16, float>}},
};

}  // namespace flashmoe::cpu
