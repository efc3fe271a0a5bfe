// Attention backward of one dense batch on the CPU: how it is cut into pieces, and the work on a
// piece. attention_backward.cpp does this for a whole call, attention_backward_sequences.cpp for
// each sequence of a call.
//
// A thread takes a tile of keys of one (batch, KV head) and every block of rows that sees some of
// it. dk and dv of the tile are summed in its scratch, over all query heads that share the KV head,
// and written once. dq is summed in the workspace: each tile of keys adds its part to a block of
// rows after the tiles before it, which the block's turn counts. The first tile stores, the last
// one writes dq. So sums have one order, whatever the number of threads, and each product is
// computed once.
//
// If a batch has few tiles of keys, its blocks of rows are cut into parts too, and a piece of work
// is a tile and a part. dk and dv are then summed in the workspace like dq, each part in its turn.
//
// Pieces are taken in order: the first tile of every head before any second one, and the first
// parts of a tile first. So a piece waits only for earlier pieces, most of which are done. Under a
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

// Pieces of a batch that has enough rows: three per thread for 16 threads.
inline constexpr int64_t kBackwardPieces = 48;
// The least blocks per part: packing the keys and adding the sums costs a seventh of a block.
inline constexpr int64_t kLeastBlocksOfPart = 4;

// How a dense batch is cut. Nothing here depends on the number of threads, and the cut of one batch
// row does not depend on how many there are.
struct BackwardCut {
  int64_t heads;   // (batch, KV head)
  int64_t rows;    // of one of them
  int64_t tiles;   // of keys; at least one, for rows that see none
  int64_t blocks;  // of rows
  int64_t tile_keys;
  int64_t block_rows;
  int64_t parts;  // of the blocks
  int64_t part_blocks;
  int64_t pieces_in_all;     // 0 if only dsinks are wanted
  int64_t blocks_in_all;     // whose dq is summed; 0 if no block of rows meets two tiles
  int64_t key_tiles_in_all;  // whose dk and dv are summed; 0 with one part

  // With more tiles than this the rows are one part.
  static int64_t most_tiles_with_parts(int64_t heads_kv) {
    return (kBackwardPieces - 1) / heads_kv;
  }

  BackwardCut(const AttentionBackwardProblem& problem, const AttentionBackwardKernel& kernel);
};

// Sums in the workspace that several pieces add to.
struct SumsInTurn {
  unsigned char* sums;
  uint64_t each;  // bytes
  Turn* turns;    // per sum: how many pieces have added to it

  SumsInTurn from(int64_t index) const { return {sum(index), each, turns + index}; }
  unsigned char* sum(int64_t index) const { return sums + static_cast<uint64_t>(index) * each; }
};

// The part of the workspace with the sums, for given numbers of blocks of rows and tiles of keys.
class BackwardSums {
 public:
  BackwardSums(const AttentionBackwardProblem& problem, const AttentionBackwardKernel& kernel,
               int64_t blocks, int64_t key_tiles);

  uint64_t bytes() const;
  SumsInTurn dq(unsigned char* base) const;
  SumsInTurn keys(unsigned char* base) const;
  // Resets the sums: no piece has added anything.
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
  SumsInTurn dq;    // [heads][blocks], blocks_in_all in total
  SumsInTurn keys;  // [heads][tiles], key_tiles_in_all in total
};

// Computes piece `index` of pieces_in_all.
void work_on_piece(const BackwardTiles& tiles, int64_t index, void* scratch);

}  // namespace flashmoe::cpu
