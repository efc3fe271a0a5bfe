// Merging partial attention results, compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/attention_numeric.h"
#include "cpu/merge_states_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace avx2 {

#include "cpu/simd_avx2.h"
// Builds on the header above.
#include "cpu/merge_rows.h"

}  // namespace avx2
}  // namespace

const MergeKernel kAvx2Merge[3] = {
    {"avx2", avx2::merge_row<float>},
    {"avx2", avx2::merge_row<Fp16>},
    {"avx2", avx2::merge_row<Bf16>},
};

}  // namespace flashmoe::cpu
