// Boxes of a tensor of rank 2, for rows that are copied one by one: fewer coordinates need fewer
// instructions per copy. Otherwise like tma.cuh's of rank 4. sm_90.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const void* map,
                                                   uint32_t barrier, uint16_t blocks, int c0,
                                                   int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier), "h"(blocks)
      : "memory");
}

}  // namespace flashmoe::ptx
