// Rotation of rows appended to a cache, compiled for AVX-512.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/kv_append_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512 {

#include "cpu/simd_avx512.h"
// Builds on the header above.
#include "cpu/kv_append_rows.h"

}  // namespace avx512
}  // namespace

const RotationKernel kAvx512Rotation[3][2] = {
    {{"avx512", avx512::rotate_heads<float, float>},
     {"avx512", avx512::rotate_heads<float, float>}},
    {{"avx512", avx512::rotate_heads<Fp16, Fp16>}, {"avx512", avx512::rotate_heads<Fp16, float>}},
    {{"avx512", avx512::rotate_heads<Bf16, Bf16>}, {"avx512", avx512::rotate_heads<Bf16, float>}},
};

}  // namespace flashmoe::cpu
