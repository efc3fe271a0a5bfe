// Attention backward on the CPU, of one dense batch: how it is cut into tiles, and the work on one.
// attention_backward.cpp does it for a whole call, attention_backward_sequences.cpp for each
// sequence of one.
//
// A thread takes a tile of keys of one (batch, KV head) and meets with it every block of rows that
// sees some of it: dk and dv of the tile are summed in its scratch, over all query heads that share
// the KV head, and written once. dq is summed in the workspace, each tile of keys adding its part
// to a block of rows when the tiles before it have: the block's turn says how many did. The first
// to come stores, the last one writes dq. So sums have one order, whatever the number of threads,
// and each product is computed once.
//
// Tiles are taken in order, first the first of every head: what a tile waits for was taken before
// it, and has mostly been done. Under a causal mask the first tiles are the longest.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_schedule.h"

namespace flashmoe::cpu {

using Turn = std::atomic<int32_t>;
static_assert(sizeof(Turn) == sizeof(int32_t) && Turn::is_always_lock_free);

inline uint64_t whole_lines(uint64_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// How a dense batch is cut. Nothing here depends on the number of threads.
struct BackwardCut {
  int64_t heads;   // (batch, KV head)
  int64_t rows;    // of one of them
  int64_t tiles;   // of keys; one where there are none, for rows that see none
  int64_t blocks;  // of rows
  int64_t tile_keys;
  int64_t block_rows;
  int64_t tiles_in_all;   // 0 where dsinks alone are wanted
  int64_t blocks_in_all;  // whose dq is summed; 0 where no block of rows is seen by two tiles

  BackwardCut(const AttentionBackwardProblem& problem, const AttentionBackwardKernel& kernel);
};

struct BackwardTiles {
  const AttentionBackwardProblem& problem;
  const AttentionBackwardKernel& kernel;
  BackwardCut cut;
  unsigned char* dq_sums;  // of blocks_in_all, each whole_lines(kernel.dq_sums_bytes(problem))
  Turn* turns;             // [heads][blocks]: tiles that have added their part, 0 to begin with
};

// Tile `index` of tiles_in_all.
void work_on_tile(const BackwardTiles& tiles, int64_t index, void* scratch);

}  // namespace flashmoe::cpu
