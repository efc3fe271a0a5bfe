// Where the steps of a tile's keys begin, as the kernels walk them and as the host counts them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__
#else
#define FLASHMOE_HOST_DEVICE
#endif

namespace flashmoe::sm90 {

inline constexpr int kRowsPerGroup = 64;  // query rows of a consumer warpgroup

// By how many keys the steps of a tile of so many queries begin before multiples of step_keys.
// Under a bound on the right the keys of each row of a group end one behind those of the row
// before. Steps begin where they do not part these ends: so every row sees a key of its group's
// first step, in which it finds its maximum. Of a row that saw none the scores of the next step
// would be computed again.
FLASHMOE_HOST_DEVICE constexpr int kv_block_alignment(int step_keys, int32_t first_row,
                                                      int32_t rows, bool bounded_right,
                                                      int32_t right_offset) {
  if (!bounded_right) return 0;
  if (step_keys % kRowsPerGroup == 0) {
    // Behind the last row's keys, and 64 by 64 before. Groups of 32 queries end there or between,
    // tiles of smaller ones are no longer than that.
    const uint32_t end = static_cast<uint32_t>(first_row) + static_cast<uint32_t>(rows) +
                         static_cast<uint32_t>(right_offset);
    return static_cast<int>((0 - end) % kRowsPerGroup);
  }
  // Behind the first of two groups.
  const int rest = (first_row % step_keys + right_offset % step_keys + kRowsPerGroup) % step_keys;
  return rest > 0 ? step_keys - rest : -rest;
}

}  // namespace flashmoe::sm90

#undef FLASHMOE_HOST_DEVICE
