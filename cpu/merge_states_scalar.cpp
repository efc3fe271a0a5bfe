// Merging partial attention results, compiled for the platform's baseline.
#include "cpu/attention_numeric.h"
#include "cpu/merge_states_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace scalar {

#include "cpu/simd_portable.h"
// Builds on the header above.
#include "cpu/merge_rows.h"

}  // namespace scalar
}  // namespace

const MergeKernel kScalarMerge[3] = {
    {"scalar", scalar::merge_row<float>},
    {"scalar", scalar::merge_row<Fp16>},
    {"scalar", scalar::merge_row<Bf16>},
};

}  // namespace flashmoe::cpu
