// How many heads an sm_90 launch mixes the tiles of, where tiles are of unequal length: a pure
// function of shapes, and the deal of tiles that it is chosen by.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/runtime.h"

namespace flashmoe::sm90 {

// Whether later tiles of a head are longer, since only the right is bounded. Those of a swizzle
// group of heads then run longest first.
bool longest_tiles_first(const AttentionProblem& problem);

// kv_block_alignment of cuda/attention/sm90/kv_block_alignment.h, for the rows of a tile.
int64_t kv_block_alignment(const AttentionProblem& problem, int step_keys, int64_t first_row,
                           int64_t rows);

// The same of the tiles of a launch of whole tiles. A single step parts no rows' ends: it begins
// with key 0, as that of a sequence does (ragged.cuh).
int64_t kv_block_alignment_of_tiles(const AttentionProblem& problem, int step_keys,
                                    int64_t first_row, int64_t rows);

// Rows before row 0 at which the first tile of a head begins where later tiles are longer: the
// whole groups of rows that full tiles have too many are left out where tiles are shortest.
int64_t spare_rows(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head);

// Steps of keys, and what a tile takes beside them, of the block that gets the most of them, when
// the tiles of a problem with longest_tiles_first are dealt to so many blocks, at most kMostBlocks,
// as the kernel's TileScheduler does it.
inline constexpr int64_t kMostBlocks = 256;
int64_t most_steps(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head,
                   int64_t blocks, int64_t heads_per_swizzle);

// Query heads of a swizzle group, a multiple of those of a KV head; 1 where tiles are of one length
// or there are none.
int32_t heads_per_swizzle(const AttentionProblem& problem, const Entry& entry,
                          int64_t tiles_per_head, const DeviceFacts& facts);

}  // namespace flashmoe::sm90
