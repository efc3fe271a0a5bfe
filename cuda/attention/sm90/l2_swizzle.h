// How many heads share a swizzle group of an sm_90 launch if tiles have unequal lengths: a pure
// function of shapes. Also the simulated deal of tiles by which it is chosen.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/runtime.h"

namespace flashmoe::sm90 {

// Whether later tiles of a head are longer, because only the right side is bounded. The tiles of a
// swizzle group then run longest first.
bool longest_tiles_first(const AttentionProblem& problem);

// kv_block_alignment of cuda/attention/sm90/kv_block_alignment.h for the rows of a tile.
int64_t kv_block_alignment(const AttentionProblem& problem, int step_keys, int64_t first_row,
                           int64_t rows);

// The same for a launch of whole tiles. A single step separates no ends of rows: it begins with key
// 0, like that of a sequence (ragged.cuh).
int64_t kv_block_alignment_of_tiles(const AttentionProblem& problem, int step_keys,
                                    int64_t first_row, int64_t rows);

// Rows before row 0 at which the first tile of a head begins if later tiles are longer. Full tiles
// may have more groups of rows than the head needs; the surplus is left out where tiles are
// shortest.
int64_t spare_rows(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head);

// Steps of keys, plus the fixed cost of tiles, of the block that gets the most. The tiles of a
// problem with longest_tiles_first are dealt to `blocks` blocks, at most kMostBlocks, as the
// kernel's TileScheduler does it.
inline constexpr int64_t kMostBlocks = 256;
int64_t most_steps(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head,
                   int64_t blocks, int64_t heads_per_swizzle);

// Query heads per swizzle group, a multiple of those per KV head. 1 if tiles have equal lengths or
// do not exist.
int32_t heads_per_swizzle(const AttentionProblem& problem, const Entry& entry,
                          int64_t tiles_per_head, const DeviceFacts& facts);

}  // namespace flashmoe::sm90
