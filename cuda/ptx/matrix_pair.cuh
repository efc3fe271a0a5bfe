// Two 8x8 matrices of 16-bit elements from shared memory and back, transposed: half of what
// ldmatrix_x4_trans and stmatrix_x4_trans move. Lanes 0 to 15 give the addresses. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
               "r"(r[0]), "r"(r[1])
               : "memory");
}

}  // namespace flashmoe::ptx
