// The kernels of the stages that work row by row, as the host sees them: for each stage the one for
// fp16, then that for bf16.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/dtype.h"
#include "core/ops/moe/gradient_chunks.h"
#include "core/ops/moe/problem.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/backward/params.h"
#include "cuda/tile/extents.h"

namespace flashmoe::moe_backward {

extern const Kernel rows_kernels[2];
extern const Kernel combine_kernels[2];
extern const Kernel sums_kernels[2];
extern const Kernel zeros_kernel_entry;
extern const Kernel slots_kernel_entry;

inline const Kernel& kernel_for(const Kernel (&kernels)[2], Dtype dtype) {
  return kernels[dtype == Dtype::kFloat16 ? 0 : 1];
}

// Checks that `sums` can number its columns in 32 bits, including those beyond the last of a block.
inline flashmoe_status check_sum_columns(int64_t columns, const Reason& reason) {
  constexpr int64_t kMost = INT_MAX - kSumColumns;
  if (columns <= kMost) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "gradients of biases: got %lld columns, accepted are at most %lld",
                       static_cast<long long>(columns), static_cast<long long>(kMost));
}

// The launch shape of `combine`.
struct CombineShape {
  int team_threads;  // per token
  int teams;         // per block
  int64_t blocks;

  int threads() const { return teams * team_threads; }
};
// Threads for a token of `columns` columns: as few passes over them as possible, all of about equal
// length.
inline int team_threads(int64_t columns) {
  constexpr int64_t kWarp = 32;
  const int64_t pieces = std::max<int64_t>(ceil_div(columns, kPiece), 1);
  const int64_t passes = ceil_div(pieces, kTeamThreads);
  return static_cast<int>(ceil_div(ceil_div(pieces, passes), kWarp) * kWarp);
}
// One block per multiprocessor, whose teams take tokens in turn. With few tokens, a block has one
// team.
inline CombineShape combine_shape(int64_t tokens, int64_t columns, int multiprocessors) {
  const int threads = team_threads(columns);
  const int most =
      std::min(threads > kThreadsPerWarp ? kMostBarriers : kMostTeams, kCombineThreads / threads);
  const int64_t teams = std::clamp<int64_t>(tokens / multiprocessors, 1, most);
  const int64_t blocks = std::min<int64_t>((tokens + teams - 1) / teams, multiprocessors);
  return {threads, static_cast<int>(teams), blocks};
}

// Slots per warp of `rows`. Short rows come many to a warp: look-ups would otherwise take as long
// as the rows. But there are no fewer warps than run at a time.
inline int32_t rows_of_warp(int64_t pairs, int64_t columns, int multiprocessors) {
  constexpr int64_t kColumns = 4096;
  constexpr int64_t kMost = 8;
  constexpr int64_t kWarpsAtATime = 20;  // per multiprocessor
  const int64_t by_columns =
      std::clamp<int64_t>(kColumns / std::max<int64_t>(columns, 1), 1, kMost);
  return static_cast<int32_t>(
      std::clamp<int64_t>(pairs / (kWarpsAtATime * multiprocessors), 1, by_columns));
}
inline int64_t rows_blocks(int64_t pairs, int32_t of_warp) {
  const int64_t of_block = int64_t{kRowWarps} * of_warp;
  return (pairs + of_block - 1) / of_block;
}

// Rows of dz: those of a chunk, or whole ones that contain the columns of a chunk. `data` is
// nullptr if there are none.
inline DzRows dz_rows(const MoeBackwardProblem& p, const InnerChunk& chunk, void* data,
                      int64_t stride) {
  const DzPlaces at = dz_places(p, chunk);
  DzRows rows = {};
  rows.data = static_cast<uint16_t*>(data);
  rows.stride = stride;
  rows.places[0] = static_cast<int32_t>(at.places[0]);
  rows.places[1] = static_cast<int32_t>(at.places[1]);
  rows.step = static_cast<int32_t>(at.step);
  return rows;
}

// The rows of dx that no expert has.
inline ZerosParams zeros_of(const GroupedProductBackwardProblem& p) {
  const int64_t of_piece = 16 / dtype_bytes(p.dx.dtype);  // elements; rows are whole pieces
  ZerosParams params = {};
  params.out = p.dx.data;
  params.row_pieces = p.columns / of_piece;
  params.row_stride = p.dx.row_stride / of_piece;
  params.expert_stride = p.dx.expert_stride / of_piece;
  params.offsets = p.offsets;
  params.counts = p.counts;
  params.rows = static_cast<int32_t>(p.rows);
  params.experts = p.experts;
  return params;
}

}  // namespace flashmoe::moe_backward
