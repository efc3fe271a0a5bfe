#include "cpu/attention_backward_tiles.h"

#include <thread>

#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {

#include "cpu/attention_visible.h"

// The tiles that contribute to a block of rows, from the first to the last. Neither decreases with
// the block. Of a block that sees no key it is one tile, which writes its zeros.
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

// Until the tiles before this one have added their part.
void wait_for_turn(const Turn& turn, int32_t before) {
  constexpr int kSpins = 1 << 10;
  for (int i = 0; turn.load(std::memory_order_acquire) != before; ++i) {
    if (i >= kSpins) std::this_thread::yield();
  }
}

void add_dq(const BackwardTiles& all, const AttentionBackwardStep& step, int64_t head,
            int64_t block, int64_t tile, const TilesOfBlock& tiles, void* scratch) {
  const bool first = tile == tiles.first;
  const bool last = tile == tiles.last;
  if (first && last) {
    all.kernel.add_dq(all.problem, step, scratch, nullptr, first, last);
    return;
  }
  const int64_t index = head * all.cut.blocks + block;
  const uint64_t bytes = whole_lines(all.kernel.dq_sums_bytes(all.problem));
  Turn& turn = all.turns[index];
  wait_for_turn(turn, static_cast<int32_t>(tile - tiles.first));
  all.kernel.add_dq(all.problem, step, scratch, all.dq_sums + static_cast<uint64_t>(index) * bytes,
                    first, last);
  turn.store(static_cast<int32_t>(tile - tiles.first + 1), std::memory_order_release);
}

}  // namespace

BackwardCut::BackwardCut(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel)
    : heads(p.batch * p.heads_kv),
      rows(p.seq_q * (p.heads_q / p.heads_kv)),
      tile_keys(kernel.tile_keys(p)),
      block_rows(kernel.block_rows(p)) {
  tiles = p.seq_k == 0 ? 1 : ceil_divide(p.seq_k, tile_keys);
  blocks = ceil_divide(rows, block_rows);
  const bool tiled = p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr;
  tiles_in_all = tiled ? heads * tiles : 0;
  blocks_in_all = p.dq.data != nullptr && tiles > 1 ? heads * blocks : 0;
}

void work_on_tile(const BackwardTiles& all, int64_t index, void* scratch) {
  const AttentionBackwardProblem& p = all.problem;
  const AttentionBackwardKernel& kernel = all.kernel;
  const BackwardCut& cut = all.cut;
  const int64_t head = index % cut.heads;
  const int64_t tile = index / cut.heads;
  AttentionBackwardStep step = {};
  step.rows.batch = head / p.heads_kv;
  step.rows.kv_head = head % p.heads_kv;
  step.first_key = tile * cut.tile_keys;
  const int64_t keys = p.seq_k - step.first_key;
  step.keys = keys < cut.tile_keys ? keys : cut.tile_keys;
  kernel.begin_keys(p, step, scratch);
  for (int64_t block = 0; block < cut.blocks; ++block) {
    const TilesOfBlock tiles(p, cut, block);
    if (tile > tiles.last) continue;
    if (tile < tiles.first) break;
    step.rows.first_row = block * cut.block_rows;
    const int64_t rows = cut.rows - step.rows.first_row;
    step.rows.rows = rows < cut.block_rows ? rows : cut.block_rows;
    kernel.add_rows(p, step, scratch);
    if (p.dq.data != nullptr) add_dq(all, step, head, block, tile, tiles, scratch);
  }
  kernel.end_keys(p, step, scratch);
}

}  // namespace flashmoe::cpu
