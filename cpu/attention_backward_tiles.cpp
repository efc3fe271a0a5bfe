#include "cpu/attention_backward_tiles.h"

#include <new>
#include <thread>

#include "core/ceil_div.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {

#include "cpu/attention_visible.h"

// The first and last tile that contribute to a block of rows. Neither decreases with the block. A
// block that sees no key has one tile, which writes its zeros.
struct TilesOfBlock {
  int64_t first;
  int64_t last;

  TilesOfBlock(const AttentionBackwardProblem& p, const BackwardCut& cut, int64_t block) {
    const int64_t group = p.heads_q / p.heads_kv;
    const int64_t row = block * cut.block_rows;
    const int64_t end_row = row + cut.block_rows < cut.rows ? row + cut.block_rows : cut.rows;
    first = first_key(p, row / group) / cut.tile_keys;
    if (first > cut.tiles - 1) first = cut.tiles - 1;
    last = (end_key(p, (end_row - 1) / group) - 1) / cut.tile_keys;
    if (last < first) last = first;
  }
};

// Waits until the tiles before this one have added their part.
void wait_for_turn(const Turn& turn, int32_t before) {
  constexpr int kSpins = 1 << 10;
  for (int i = 0; turn.load(std::memory_order_acquire) != before; ++i) {
    if (i >= kSpins) std::this_thread::yield();
  }
}

// Calls `add(sum, first, last)` once the `place` earlier pieces have added. A piece that is alone
// needs no sum.
template <typename Add>
void add_in_turn(const SumsInTurn& all, int64_t index, int64_t place, int64_t places,
                 const Add& add) {
  if (places == 1) return add(nullptr, true, true);
  Turn& turn = all.turns[index];
  wait_for_turn(turn, static_cast<int32_t>(place));
  add(all.sum(index), place == 0, place == places - 1);
  turn.store(static_cast<int32_t>(place + 1), std::memory_order_release);
}

// The blocks of rows that a tile contributes to. A tile that contributes to none has the first
// block, whose part writes its zeros.
struct BlocksOfTile {
  int64_t begin = 0;
  int64_t end = 0;

  BlocksOfTile(const AttentionBackwardProblem& p, const BackwardCut& cut, int64_t tile) {
    while (begin < cut.blocks && TilesOfBlock(p, cut, begin).last < tile) ++begin;
    end = begin;
    while (end < cut.blocks && TilesOfBlock(p, cut, end).first <= tile) ++end;
    if (begin == end) begin = end = 0;
  }

  int64_t first_part(const BackwardCut& cut) const { return begin / cut.part_blocks; }
  int64_t last_part(const BackwardCut& cut) const {
    return begin == end ? 0 : (end - 1) / cut.part_blocks;
  }
};

}  // namespace

BackwardCut::BackwardCut(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel)
    : heads(p.batch * p.heads_kv),
      rows(p.seq_q * (p.heads_q / p.heads_kv)),
      tile_keys(kernel.tile_keys(p)),
      block_rows(kernel.block_rows(p)) {
  tiles = p.seq_k == 0 ? 1 : ceil_div(p.seq_k, tile_keys);
  blocks = ceil_div(rows, block_rows);
  const int64_t most_parts = blocks / kLeastBlocksOfPart;
  parts = ceil_div(ceil_div(kBackwardPieces, tiles), p.heads_kv);
  parts = parts < most_parts ? parts : most_parts;
  part_blocks = parts > 1 ? ceil_div(blocks, parts) : blocks + 1;
  parts = parts > 1 ? ceil_div(blocks, part_blocks) : 1;
  const bool keys = p.dk.data != nullptr || p.dv.data != nullptr;
  const bool tiled = p.dq.data != nullptr || keys;
  pieces_in_all = tiled ? heads * tiles * parts : 0;
  blocks_in_all = p.dq.data != nullptr && tiles > 1 ? heads * blocks : 0;
  key_tiles_in_all = keys && parts > 1 ? heads * tiles : 0;
}

BackwardSums::BackwardSums(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                           int64_t blocks, int64_t key_tiles)
    : dq_each_(whole_lines(kernel.dq_sums_bytes(p))),
      keys_each_(whole_lines(kernel.key_sums_bytes(p))),
      blocks_(blocks),
      key_tiles_(key_tiles) {}

uint64_t BackwardSums::bytes() const {
  const auto blocks = static_cast<uint64_t>(blocks_);
  const auto key_tiles = static_cast<uint64_t>(key_tiles_);
  return blocks * dq_each_ + key_tiles * keys_each_ +
         whole_lines((blocks + key_tiles) * sizeof(Turn));
}

SumsInTurn BackwardSums::dq(unsigned char* base) const { return {base, dq_each_, turns(base)}; }

SumsInTurn BackwardSums::keys(unsigned char* base) const {
  return {dq(base).sum(blocks_), keys_each_, turns(base) + blocks_};
}

Turn* BackwardSums::turns(unsigned char* base) const {
  return reinterpret_cast<Turn*>(base + static_cast<uint64_t>(blocks_) * dq_each_ +
                                 static_cast<uint64_t>(key_tiles_) * keys_each_);
}

void BackwardSums::begin(unsigned char* base) const {
  for (int64_t i = 0; i < blocks_ + key_tiles_; ++i) new (&turns(base)[i]) Turn(0);
}

void work_on_piece(const BackwardTiles& all, int64_t index, void* scratch) {
  const AttentionBackwardProblem& p = all.problem;
  const AttentionBackwardKernel& kernel = all.kernel;
  const BackwardCut& cut = all.cut;
  const int64_t head = index % cut.heads;
  const int64_t part = index / cut.heads % cut.parts;
  const int64_t tile = index / cut.heads / cut.parts;
  const BlocksOfTile seen(p, cut, tile);
  const int64_t first_part = seen.first_part(cut);
  const int64_t last_part = seen.last_part(cut);
  if (part < first_part || part > last_part) return;
  AttentionBackwardStep step = {};
  step.rows.batch = head / p.heads_kv;
  step.rows.kv_head = head % p.heads_kv;
  step.first_key = tile * cut.tile_keys;
  const int64_t keys = p.seq_k - step.first_key;
  step.keys = keys < cut.tile_keys ? keys : cut.tile_keys;
  kernel.begin_keys(p, step, scratch);
  const int64_t part_begin = part * cut.part_blocks;
  const int64_t part_end = part_begin + cut.part_blocks;
  const int64_t end = seen.end < part_end ? seen.end : part_end;
  for (int64_t block = seen.begin > part_begin ? seen.begin : part_begin; block < end; ++block) {
    step.rows.first_row = block * cut.block_rows;
    const int64_t rows = cut.rows - step.rows.first_row;
    step.rows.rows = rows < cut.block_rows ? rows : cut.block_rows;
    kernel.add_rows(p, step, scratch);
    if (p.dq.data == nullptr) continue;
    const TilesOfBlock tiles(p, cut, block);
    add_in_turn(all.dq, head * cut.blocks + block, tile - tiles.first, tiles.last - tiles.first + 1,
                [&](void* sums, bool first, bool last) {
                  kernel.add_dq(p, step, scratch, sums, first, last);
                });
  }
  if (p.dk.data == nullptr && p.dv.data == nullptr) return;
  add_in_turn(all.keys, head * cut.tiles + tile, part - first_part, last_part - first_part + 1,
              [&](void* sums, bool first, bool last) {
                kernel.end_keys(p, step, scratch, sums, first, last);
              });
}

}  // namespace flashmoe::cpu
