// Rotation of rows appended to a cache, compiled for the platform's baseline.
#include "cpu/attention_numeric.h"
#include "cpu/kv_append_kernel.h"

namespace flashmoe::cpu {
namespace {
namespace scalar {

#include "cpu/simd_portable.h"
// Builds on the header above.
#include "cpu/kv_append_rows.h"

}  // namespace scalar
}  // namespace

const RotationKernel kScalarRotation[3][2] = {
    {{"scalar", scalar::rotate_heads<float, float>},
     {"scalar", scalar::rotate_heads<float, float>}},
    {{"scalar", scalar::rotate_heads<Fp16, Fp16>}, {"scalar", scalar::rotate_heads<Fp16, float>}},
    {{"scalar", scalar::rotate_heads<Bf16, Bf16>}, {"scalar", scalar::rotate_heads<Bf16, float>}},
};

}  // namespace flashmoe::cpu
