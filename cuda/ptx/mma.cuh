// mma.sync.aligned.m16n8k16: D[16,8] += A[16,16] B[16,8], 16-bit operands, fp32 accumulation.
// sm_80 and newer. Fragments of lane l, with g = l / 4 and t = l % 4 (PTX ISA, "Matrix Fragments
// for mma.m16n8k16"):
//   a[0] A[g, 2t..2t+1]   a[1] A[g+8, 2t..]   a[2] A[g, 2t+8..]   a[3] A[g+8, 2t+8..]
//   b0   B[2t..2t+1, g]   b1   B[2t+8.., g]
//   d[0..1] D[g, 2t..2t+1]                    d[2..3] D[g+8, 2t..2t+1]
#pragma once

#include <cstdint>

#include "cuda/numeric/element.h"

namespace flashmoe::ptx {

template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flashmoe::ptx
