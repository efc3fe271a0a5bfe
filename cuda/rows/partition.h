// How blocks divide the rows that appending, gathering and merging move, where rows are, and the
// launch of the one kernel. Host code.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"
#include "cuda/rows/rows.h"

namespace flashmoe::rows {

// The fields are those of the kernel's Params.
struct Partition {
  int64_t rows;
  int64_t row_units;
  int64_t block_rows;
  int64_t block_units;
  int64_t blocks;
  int64_t parts;
  int threads;
};

inline constexpr int64_t kMostUnits = 8;  // of a thread, where parts need no more
// The most units of a row, whose last part ends there: threads count on by their number of units,
// beyond the end.
inline constexpr int64_t kMostRowUnits = INT_MAX - kThreads * kMostUnits;

// Limits the parts to as many as a grid may have along its second axis, and counts the blocks.
// False where what threads count does not fit in 31 bits.
inline bool fit_parts(Partition* partition) {
  constexpr int64_t kMostParts = 65535;
  Partition& s = *partition;
  if (s.parts > kMostParts) {
    s.block_units = ceil_div(ceil_div(s.row_units, kMostParts), s.threads) * s.threads;
    s.parts = ceil_div(s.row_units, s.block_units);
  }
  s.blocks = std::max<int64_t>(ceil_div(s.rows, s.block_rows), 1);
  return s.parts * s.block_units <= kMostRowUnits;
}

// Plans the launch for rows of dimensions `dim` and `dim_v`.
inline void plan_rows(const Kernel& kernel, int device_id, const Partition& partition, int64_t dim,
                      int64_t dim_v, Plan* plan) {
  flashmoe_launch& launch =
      plan_launch(kernel, device_id, "", partition.blocks, partition.threads, 0, plan);
  launch.grid[1] = static_cast<uint32_t>(partition.parts);
  launch.tile_m = static_cast<int32_t>(partition.block_rows);
  launch.tile_n = static_cast<int32_t>(partition.block_units);
  launch.dim = static_cast<int32_t>(dim);
  launch.dim_v = static_cast<int32_t>(dim_v);
  launch.stages = 1;
}

// A stride in bytes. A stride by which nothing is ever found may be any number: its product wraps.
inline int64_t bytes_of(int64_t stride, Dtype dtype) {
  return static_cast<int64_t>(static_cast<uint64_t>(stride) *
                              static_cast<uint64_t>(dtype_bytes(dtype)));
}

template <class Data>
Rows rows_of(const RowsView<Data>& view) {
  return {const_cast<char*>(static_cast<const char*>(view.data)),
          bytes_of(view.strides.batch, view.dtype), bytes_of(view.strides.seq, view.dtype),
          bytes_of(view.strides.head, view.dtype)};
}

inline Scales scales_of(const KeyScales& given) {
  return {static_cast<const float*>(given.data), given.batch_stride, given.head_stride};
}

// The divisor for an extent. What is divided has 31 bits, so that a longer extent divides as
// 2^31 - 1 does. An extent of 0 belongs to calls that have no such rows, and divides nothing.
inline Divisor divisor_of(int64_t extent) {
  return Divisor::of(static_cast<uint32_t>(std::clamp<int64_t>(extent, 1, INT_MAX)));
}

// Launches the plan's kernel with make_params(problem, its launch).
template <class Problem, class MakeParams>
flashmoe_status launch_one(const Problem& problem, const Plan& plan, void* stream,
                           const MakeParams& make_params) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const auto params = make_params(problem, plan.info.launches[0]);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace flashmoe::rows
