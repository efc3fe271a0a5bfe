// Attention backward on the CPU, of one dense batch: how it is cut into pieces, and the work on
// one. attention_backward.cpp does it for a whole call, attention_backward_sequences.cpp for each
// sequence of one.
//
// A thread takes a tile of keys of one (batch, KV head) and meets with it every block of rows that
// sees some of it: dk and dv of the tile are summed in its scratch, over all query heads that share
// the KV head, and written once. dq is summed in the workspace, each tile of keys adding its part
// to a block of rows when the tiles before it have: the block's turn says how many did. The first
// to come stores, the last one writes dq. So sums have one order, whatever the number of threads,
// and each product is computed once.
//
// Where a batch has few tiles of keys, its blocks of rows are cut into parts too, and a piece of
// work is a tile and a part. dk and dv are then summed in the workspace as dq is, each part in its
// turn.
//
// Pieces are taken in order, the first tile of every head before any second one, and of a tile the
// first parts first: what a piece waits for was taken before it, and has mostly been done. Under a
// causal mask the first tiles are the longest.
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

// Pieces that one batch is cut into where it has the rows for it: three a thread for 16 threads.
inline constexpr int64_t kBackwardPieces = 48;
// Of a part of the rows, at least: packing the keys and adding the sums costs a seventh of a block.
inline constexpr int64_t kLeastBlocksOfPart = 4;

// How a dense batch is cut. Nothing here depends on the number of threads, and what one batch is
// cut into does not depend on how many there are.
struct BackwardCut {
  int64_t heads;   // (batch, KV head)
  int64_t rows;    // of one of them
  int64_t tiles;   // of keys; one where there are none, for rows that see none
  int64_t blocks;  // of rows
  int64_t tile_keys;
  int64_t block_rows;
  int64_t parts;  // of the blocks
  int64_t part_blocks;
  int64_t pieces_in_all;     // 0 where dsinks alone are wanted
  int64_t blocks_in_all;     // whose dq is summed; 0 where no block of rows is seen by two tiles
  int64_t key_tiles_in_all;  // whose dk and dv are summed; 0 where there is one part

  // With more tiles than these the rows are one part.
  static int64_t most_tiles_with_parts(int64_t heads_kv) {
    return (kBackwardPieces - 1) / heads_kv;
  }

  BackwardCut(const AttentionBackwardProblem& problem, const AttentionBackwardKernel& kernel);
};

// Sums in the workspace that several pieces add to.
struct SumsInTurn {
  unsigned char* sums;
  uint64_t each;  // bytes
  Turn* turns;    // of each sum, how many pieces have added to it

  SumsInTurn from(int64_t index) const { return {sum(index), each, turns + index}; }
  unsigned char* sum(int64_t index) const { return sums + static_cast<uint64_t>(index) * each; }
};

// The part of the workspace with the sums of so many blocks of rows and tiles of keys.
class BackwardSums {
 public:
  BackwardSums(const AttentionBackwardProblem& problem, const AttentionBackwardKernel& kernel,
               int64_t blocks, int64_t key_tiles);

  uint64_t bytes() const;
  SumsInTurn dq(unsigned char* base) const;
  SumsInTurn keys(unsigned char* base) const;
  // No piece has added anything.
  void begin(unsigned char* base) const;

 private:
  Turn* turns(unsigned char* base) const;

  uint64_t dq_each_;
  uint64_t keys_each_;
  int64_t blocks_;
  int64_t key_tiles_;
};

struct BackwardTiles {
  const AttentionBackwardProblem& problem;
  const AttentionBackwardKernel& kernel;
  BackwardCut cut;
  SumsInTurn dq;    // [heads][blocks], of blocks_in_all
  SumsInTurn keys;  // [heads][tiles], of key_tiles_in_all
};

// Piece `index` of pieces_in_all.
void work_on_piece(const BackwardTiles& tiles, int64_t index, void* scratch);

}  // namespace flashmoe::cpu
