// Merging partial attention results, compiled for AVX-512.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/merge_states_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx512 {

#include "cpu/simd_avx512.h"
// Builds on the header above.
#include "cpu/merge_rows.h"

}  // namespace avx512
}  // namespace

const MergeKernel kAvx512Merge[3] = {
    {"avx512", avx512::merge_row<float>},
    {"avx512", avx512::merge_row<Fp16>},
    {"avx512", avx512::merge_row<Bf16>},
};

}  // namespace flashmoe::cpu
