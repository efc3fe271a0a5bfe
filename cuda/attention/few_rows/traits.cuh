// Constants of the products of few rows: what a warp's step holds, and a block's share in shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/tile/extents.h"

namespace flashmoe::few_rows {

// Registers that a lane needs with so many keys per step: K and V, Q and the accumulators, and
// scores.
constexpr int lane_registers(int keys, int rows, int dim, int dim_v, bool queries_in_registers) {
  return keys * (dim + dim_v) / 64 + (queries_in_registers ? rows * dim / 64 : 0) +
         rows * dim_v / 32 + keys * rows / 32;
}

template <class Element_, int kDim_, int kDimV_, int kRows_>
struct Traits {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kRows = kRows_;  // packed query rows of a tile

  // A thread has 255 registers. About 50 of them hold addresses, statistics and temporaries.
  static constexpr int kRegisterBudget = 204;
  static constexpr bool kQueriesInRegisters =
      lane_registers(16, kRows, kDim, kDimV, true) <= kRegisterBudget;
  // Keys per step of a warp.
  static constexpr int kStepKeys =
      lane_registers(32, kRows, kDim, kDimV, kQueriesInRegisters) <= kRegisterBudget ? 32 : 16;

  static constexpr int kRowBlocks = kRows / 8;       // n8 blocks of the products
  static constexpr int kKeyBlocks = kStepKeys / 16;  // m16 blocks of scores, k16 steps of P V
  static constexpr int kKChunks = kDim / 32;         // 16-byte chunks of a key in a lane
  static constexpr int kVChunks = kDimV / 64;
  static constexpr int kUnitsPerRow = kDimV / 4;  // 16-byte units of an fp32 output row
  static constexpr int kUnits = kRows * kUnitsPerRow;
  static constexpr int kUnitsLog2 = log2_of(kUnits);

  // Shared memory, in bytes.
  static constexpr int kPartialBytes = kUnits * 16;   // one part of the output
  static constexpr int kStatisticsBytes = kRows * 8;  // row max and sum per row
  static constexpr int kPartBytes = kPartialBytes + kStatisticsBytes;
  static constexpr int kQueryBytes =
      kQueriesInRegisters ? 0 : kRowBlocks * kKChunks * kThreadsPerWarp * 16;
  static constexpr int kLimitBytes = kRows * 8;  // first and end key of each row
  static constexpr int kBarrierBytes = 16;
  static constexpr int kFixedBytes = kQueryBytes + kLimitBytes + kBarrierBytes;

  // A block has a part for each warp. In a cluster it also has a slice of each block's part, which
  // together are as large as one part, with the statistics of all blocks.
  static constexpr int shared_bytes(int warps, int cluster) {
    return kFixedBytes + warps * kPartBytes +
           (cluster > 1 ? kPartialBytes + cluster * kStatisticsBytes : 0);
  }

  static_assert(kDim % 32 == 0 && kDimV % 64 == 0, "a lane takes whole chunks of 16 bytes");
  static_assert(1 << kUnitsLog2 == kUnits);
  static_assert(kRows % 8 == 0 && kRows <= kThreadsPerWarp);
  static_assert(lane_registers(kStepKeys, kRows, kDim, kDimV, kQueriesInRegisters) <=
                kRegisterBudget);
};

}  // namespace flashmoe::few_rows
