// mma.sync.aligned.m16n8k8: D[16,8] += A[16,8] B[8,8], 16-bit operands, fp32 accumulation. sm_80
// and newer. Fragments of lane l, with g = l / 4 and t = l % 4 (PTX ISA, "Matrix Fragments for
// mma.m16n8k8"):
//   a[0] A[g, 2t..2t+1]   a[1] A[g+8, 2t..2t+1]   b B[2t..2t+1, g]
//   d[0..1] D[g, 2t..2t+1]   d[2..3] D[g+8, 2t..2t+1]
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmoe::ptx {

template <class Element>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b);

template <>
__device__ __forceinline__ void mma_m16n8k8<__half>(float (&d)[4], const uint32_t (&a)[2],
                                                    uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k8<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[2],
                                                           uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace flashmoe::ptx
