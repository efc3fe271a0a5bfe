// stmatrix: four 8x8 matrices of 16-bit elements to shared memory, the inverse of ldmatrix. Lanes
// 8i..8i+7 give the addresses of the eight 16-byte rows of matrix i. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same with each 8x8 matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Two matrices, each transposed. Lanes 0 to 15 give the addresses.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
               "r"(r[0]), "r"(r[1])
               : "memory");
}

}  // namespace flashmoe::ptx
