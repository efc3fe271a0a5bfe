// movmatrix: transposes an 8 x 8 matrix of 16-bit elements across the lanes of a warp. Lane l holds
// elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, before and after. sm_75 and newer.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace flashmoe::ptx
