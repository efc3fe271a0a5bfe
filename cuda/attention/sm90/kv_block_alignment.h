// Where the steps of a tile's keys begin, for the kernels and for the host's counts.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__
#else
#define FLASHMOE_HOST_DEVICE
#endif

namespace flashmoe::sm90 {

inline constexpr int kRowsPerGroup = 64;  // query rows per consumer warpgroup

// How many keys before multiples of step_keys the steps of a tile begin. Under a bound on the
// right, the keys of each row of a group end one later than those of the row before. Step
// boundaries do not separate these ends. So every row sees a key of its group's first step, and has
// its row max from there. Otherwise the scores of the next step would have to be recomputed for
// rows that saw none.
FLASHMOE_HOST_DEVICE constexpr int kv_block_alignment(int step_keys, int32_t first_row,
                                                      int32_t rows, bool bounded_right,
                                                      int32_t right_offset) {
  if (!bounded_right) return 0;
  if (step_keys % kRowsPerGroup == 0) {
    // A boundary is behind the last row's keys, and every 64 keys before. Groups of 32 queries end
    // there or halfway; tiles of smaller groups are no longer than that.
    const uint32_t end = static_cast<uint32_t>(first_row) + static_cast<uint32_t>(rows) +
                         static_cast<uint32_t>(right_offset);
    return static_cast<int>((0 - end) % kRowsPerGroup);
  }
  // A boundary is behind the first of two groups.
  const int rest = (first_row % step_keys + right_offset % step_keys + kRowsPerGroup) % step_keys;
  return rest > 0 ? step_keys - rest : -rest;
}

}  // namespace flashmoe::sm90

#undef FLASHMOE_HOST_DEVICE
